"""Laws of what a reward counts for: less for each token before it where it is discounted, and
nothing for others where a response has no tokens."""

from __future__ import annotations

import re

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import REWARDS
from rlcli.testing.batches import Lengths
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.interface.actions import with_tensor
from rlcli.testing.interface.advantages import (
    RETURNS,
    rated_actions,
    skip_unless_groups_are_compared,
    skip_without_rewards,
)
from rlcli.testing.interface.inference_trial import CallSubject, CallTrial, usual_batch
from rlcli.testing.interface.outputs import TOLERANCE, check_same, sequences, tensor_of
from rlcli.testing.interface.training_trial import Batches

PER_TOKEN = re.compile(r"\bdiscount\b.*\bper\s+(token|action|step)\b", re.I | re.S)
"""What the documentation of an argument says by which rewards count less for each token."""
DISCOUNT = 0.5
LARGE = 50.0
"""A reward beyond those of the usual batch, in both directions."""
WITH_EMPTY: Lengths = [[(2, 3 + i % 2), (2, 0), (2, 1 + i % 3)] for i in range(4)]
"""Groups of three responses, the second of which has no tokens."""


class CreditChecks(CallSubject):
    def test_a_discount_counts_for_each_token(self, rating: CallTrial) -> None:
        """with a discount of a half per token, a reward counts at most half as much for the return
        of each action as for that of the next"""
        names = self.require_documented_as(PER_TOKEN, "has no discount per token")
        skip_without_rewards(rating)
        skip_if(
            RETURNS not in rating.result.keys,
            "makes no returns",
        )
        for name in names:
            for effects in _effects_of_rewards(rating, {name: DISCOUNT}):
                most = DISCOUNT * effects[1:] + TOLERANCE
                if bool((effects[:-1] > most).any()):
                    shown = ", ".join(f"{effect:.3g}" for effect in effects.tolist())
                    raise Violation(
                        f"with {name}={DISCOUNT:g} a reward counts for the returns of the actions "
                        f"before it by {shown}",
                        "discount all that comes later, not only the next value",
                        rating.where,
                    )

    def test_a_response_without_tokens_is_as_if_missing(
        self, rating: CallTrial, inference_batches: Batches
    ) -> None:
        """where the reward of a response without tokens changes nothing, the response itself does
        not count either"""
        skip_without_rewards(rating)
        skip_unless_groups_are_compared(rating)
        batch = usual_batch(inference_batches, WITH_EMPTY)
        skip_if(
            len(batch.flat_seqlens(REWARDS)) != sum(map(len, WITH_EMPTY)),
            "not tried: compares groups of another size",
        )
        is_empty = torch.tensor([not answer for group in WITH_EMPTY for _, answer in group])
        rewards = tensor_of(batch, REWARDS)
        results = [
            _without_empty(
                rating.run(with_tensor(batch, REWARDS, torch.where(is_empty, reward, rewards)))
            )
            for reward in (-LARGE, LARGE)
        ]
        skip_unless(
            _are_equal(*results), "gives responses without tokens a part in what others get"
        )
        check_same(
            results[0],
            _without_metadata(rating.run(_without_empty(batch))),
            "without the responses that have no tokens, whose rewards change nothing",
            "count the responses that rewards are taken from, not all",
            rating.where,
        )


def _effects_of_rewards(rating: CallTrial, changes: dict[str, float]) -> list[torch.Tensor]:
    """For each response with several trained actions whose return its reward changes: by how much
    a reward higher by 1 raises the return of each of these actions."""
    batch = rating.batch
    rewards = tensor_of(batch, REWARDS).float()
    outputs = [
        rating.run(with_tensor(batch, REWARDS, rewards + higher), changes=changes)
        for higher in (0.0, 1.0)
    ]
    rated, masks = rated_actions(batch, outputs[0])
    rises = tensor_of(outputs[1], RETURNS).double() - tensor_of(outputs[0], RETURNS).double()
    pairs = zip(rises.split(rated.flat_seqlens(RETURNS)), masks, strict=True)
    effects = [rise[mask] for rise, mask in pairs]
    return [row for row in effects if len(row) > 1 and float(row[-1]) > TOLERANCE]


def _without_empty(sample: SequenceSample) -> SequenceSample:
    """A copy without the second sequence of each group, and without metadata."""
    copy = _without_metadata(sample)
    for key in sample.keys:
        rows = iter(sequences(sample, key))
        groups = [[next(rows) for _ in group] for group in sample.seqlens[key]]
        others = [[row for number, row in enumerate(group) if number != 1] for group in groups]
        copy.data[key] = torch.cat([row for group in others for row in group])
        copy.seqlens[key] = [[len(row) for row in group] for group in others]
    return copy


def _without_metadata(sample: SequenceSample) -> SequenceSample:
    copy = sample.select(sample.keys)
    copy.metadata = {}
    return copy


def _are_equal(first: SequenceSample, second: SequenceSample) -> bool:
    return all(torch.equal(first.data[key], second.data[key]) for key in first.keys)
