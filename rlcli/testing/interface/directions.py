"""Laws of the direction in which advantages move the tokens of a policy."""

from __future__ import annotations

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import ADVANTAGES, CHOSEN, SEQUENCES
from rlcli.testing.contract import Violation, skip_unless
from rlcli.testing.interface.actions import LOSS_MASK, per_action, trained_actions, with_tensor
from rlcli.testing.interface.loss import gradients_of
from rlcli.testing.interface.policies import (
    LOGPROBS,
    gap_of_weights,
    in_one_step,
    with_own_logprobs,
)
from rlcli.testing.interface.training_trial import InterfaceSubject, Rehearsal

SMALL = 1e-5
FAR = 0.5
"""In nats: beyond any usual bound of a policy's ratio."""
ROUNDING = 1e-12


class DirectionChecks(InterfaceSubject):
    def test_what_comes_back_is_not_clipped(self, rehearsal: Rehearsal) -> None:
        """where actions far from the old policy are left out, these are the ones that would go
        farther, not those that come back"""
        batch = rehearsal.batch
        skip_unless(
            {"old_logprobs", ADVANTAGES} <= batch.keys,
            "compares no old log-probs with the policy's, weighted by advantages",
        )
        near = with_own_logprobs(batch, rehearsal.model().module)
        for log_ratio, change in ((FAR, "likelier"), (-FAR, "less likely")):
            moved = with_tensor(near, "old_logprobs", near.data["old_logprobs"] - log_ratio)
            nothing, good, bad = (_learned(rehearsal, moved, by) for by in (0.0, 1.0, -1.0))
            rewarded, punished = gap_of_weights(nothing, good), gap_of_weights(nothing, bad)
            farther, back = (rewarded, punished) if log_ratio > 0 else (punished, rewarded)
            if back <= ROUNDING < farther:
                raise Violation(
                    f"of actions that became {change}, advantages teach nothing that would bring "
                    "them back, but take them farther",
                    "take the smaller of both objectives, that is the larger loss: min, not max",
                    rehearsal.where,
                )

    def test_advantages_teach_in_their_direction(self, rehearsal: Rehearsal) -> None:
        """where the policy is that which sampled, no token of a response with an advantage above 0
        becomes less likely, and none below 0 likelier"""
        batch = rehearsal.batch
        is_compared = bool(set(LOGPROBS) & batch.keys)
        if not is_compared or ADVANTAGES not in batch.keys or trained_actions(batch) is None:
            pytest.skip("learns from no advantages of what another policy sampled")
        near = _trained_on_policy(rehearsal)
        signs = 1.0 - 2.0 * (torch.arange(len(batch.flat_seqlens(SEQUENCES))) % 2)
        advantages = per_action(batch, signs).to(batch.data[ADVANTAGES])
        taught, nothing = (
            _gradient_of_logprobs(rehearsal, with_tensor(near, ADVANTAGES, numbers))
            for numbers in (advantages, torch.zeros_like(advantages))
        )
        wrong = int(((taught - nothing) * advantages > SMALL).sum())
        if wrong:
            raise Violation(
                f"{wrong} of {len(advantages)} tokens move against their advantages, though the "
                "policy is that which sampled them",
                "a weight or a ratio has a gradient that it should not have: detach it; or a sign",
                rehearsal.where,
            )


def _trained_on_policy(rehearsal: Rehearsal) -> SequenceSample:
    """The usual batch, as the policy itself sampled it, with all sequences trained on."""
    near = with_own_logprobs(rehearsal.batch, rehearsal.model().module)
    for mask in {LOSS_MASK, CHOSEN} & near.keys:
        near = with_tensor(near, mask, torch.ones_like(near.data[mask]))
    return near


def _gradient_of_logprobs(rehearsal: Rehearsal, batch: SequenceSample) -> torch.Tensor:
    """[T - N] that of all log-probs in an optimizer step that leaves the model as it is; skips the
    check where a step takes a part of the batch, or other outputs."""
    outcome = rehearsal.train(batch, lr=0.0, changes=in_one_step(rehearsal))
    gradient = gradients_of(outcome, "logprobs", len(batch.data[ADVANTAGES]))
    if gradient is None:
        pytest.skip("not tried: a step takes a part of the batch, or other outputs")
    return gradient


def _learned(
    rehearsal: Rehearsal, batch: SequenceSample, advantage: float
) -> dict[str, torch.Tensor]:
    """The weights after a step with this advantage for every action."""
    advantages = torch.full_like(batch.data[ADVANTAGES], advantage)
    return rehearsal.train(with_tensor(batch, ADVANTAGES, advantages)).weights
