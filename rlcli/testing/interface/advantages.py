"""The check of advantages: a higher reward raises those of its own response, not of others."""

from __future__ import annotations

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import largest_number
from rlcli.testing.contract import Violation
from rlcli.testing.interface.actions import trained_actions
from rlcli.testing.interface.inference_trial import CallSubject, CallTrial
from rlcli.testing.interface.outputs import TOLERANCE, sequences, tensor_of


class AdvantageChecks(CallSubject):
    def test_a_higher_reward_raises_the_advantages_of_its_response(
        self, inferring: CallTrial
    ) -> None:
        """a higher reward never lowers the advantages of its own response, and on average raises
        them more than those of the others"""
        if "rewards" not in inferring.batch.keys or "advantages" not in inferring.result.keys:
            pytest.skip("makes no advantages from rewards")
        rises = _rises(inferring)
        rise, others = rises.diagonal(), rises[~torch.eye(len(rises), dtype=torch.bool)]
        if rise.isnan().all():
            pytest.skip("not tried: none of its responses is trained on")
        lowest = float(rise[~rise.isnan()].min())
        if lowest < -TOLERANCE:
            raise Violation(
                f"a reward higher by 1 lowers the advantages of its response by {-lowest:.3g}",
                (
                    "look for a wrong sign, or a baseline that subtracts a response's own reward "
                    "more than once"
                ),
                inferring.where,
            )
        mean_rise, mean_of_others = float(rise.nanmean()), float(others.nanmean())
        if mean_rise <= max(0.0, mean_of_others) + TOLERANCE:
            raise Violation(
                (
                    "rewards higher by 1 raise the advantages of their response by "
                    f"{mean_rise:.3g} on average, and those of others by {mean_of_others:.3g}"
                ),
                (
                    "look for a baseline that is subtracted twice, or for rows of another "
                    "response: they are paired by position"
                ),
                inferring.where,
            )

    def test_shifting_the_rewards_of_a_group_changes_no_advantage(
        self, inferring: CallTrial
    ) -> None:
        """where responses to a prompt are compared, a constant added to their rewards changes
        nothing"""
        batch = inferring.batch
        if "rewards" not in batch.keys or "advantages" not in inferring.result.keys:
            pytest.skip("makes no advantages from rewards")
        if largest_number(inferring.interface.group_sizes(inferring.call), default=1) < 2:
            pytest.skip("does not declare that it compares responses to a prompt (NEEDS_GROUP)")
        counts = torch.tensor([len(group) for group in batch.seqlens["rewards"]])
        shifts = torch.repeat_interleave(torch.arange(batch.bs) % 3 - 1.0, counts)
        shifted = batch.select(batch.keys)
        shifted.data = {**shifted.data, "rewards": batch.data["rewards"] + shifts}
        gap = _means(inferring, shifted) - _means(inferring, batch)
        largest = float(gap.abs().nan_to_num().max())
        if largest > TOLERANCE:
            raise Violation(
                f"rewards of a group that are all higher by 1 change an advantage by {largest:.3g}",
                "compare within the group: the baseline is of its responses alone",
                inferring.where,
            )


def _rises(inferring: CallTrial) -> torch.Tensor:
    """[N, N]: by how much a higher reward of response i raises the advantages of response j."""
    batch = inferring.batch
    before, rewards = _means(inferring, batch), tensor_of(batch, "rewards").float()
    rows = []
    for higher in torch.eye(len(rewards)):
        raised = batch.select(batch.keys)
        raised.data = {**raised.data, "rewards": rewards + higher}
        rows.append(_means(inferring, raised) - before)
    return torch.stack(rows)


def _means(inferring: CallTrial, batch: SequenceSample) -> torch.Tensor:
    """[N] the mean advantage of each response's actions that are trained on; NaN without any."""
    rated = batch.select(batch.keys)
    rated.update_(inferring.run(batch))
    trained = trained_actions(rated)
    assert trained is not None
    lengths = rated.flat_seqlens("advantages")
    return torch.stack(
        [
            advantages[mask].mean()
            for advantages, mask in zip(
                sequences(rated, "advantages"), trained.split(lengths), strict=True
            )
        ]
    )
