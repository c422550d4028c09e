"""Interfaces that learn from pairs, some of which prefer the wrong one."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from rlcli.api.model import ModelInterface
from rlcli.ops.packing import action_mask
from rlcli.testing.contract import Violation
from rlcli.testing.interface.invariants import LawChecks
from rlcli.testing.interface.training_trial import Rehearsal, usual_batches


class LearnsFromPairs(ModelInterface):
    """DPO, with a beta of 1."""

    READS: ClassVar = {"train_step": ("packed_input_ids", "prompt_mask", "packed_ref_logprobs")}
    NEEDS_GROUP: ClassVar = {"train_step": ("2",)}

    def train_step(self, model, data, mb_spec):
        return model.module.train_batch(data, self.loss, pairs, mb_spec=mb_spec)

    def loss(self, output, batch):
        scores = self.scores(output.logprobs, batch)
        return -torch.nn.functional.logsigmoid(self.lead(scores)).sum()

    def scores(self, logprobs, batch):
        lengths = batch.flat_seqlens("packed_input_ids")
        mask = action_mask(batch.data["prompt_mask"], lengths)
        ratios = self.ratio(logprobs, batch.data["packed_ref_logprobs"]) * mask
        return torch.stack([row.sum() for row in ratios.split([n - 1 for n in lengths])])

    def ratio(self, logprobs, reference):
        return logprobs - reference

    def lead(self, scores):
        return scores[0::2] - scores[1::2]


def pairs(batch):
    return len(batch.flat_seqlens("packed_input_ids")) // 2


class PrefersTheRejected(LearnsFromPairs):
    def lead(self, scores):
        return scores[1::2] - scores[0::2]


class AddsTheReference(LearnsFromPairs):
    def ratio(self, logprobs, reference):
        return logprobs + reference


class TakesTheFirstHalfForChosen(LearnsFromPairs):
    """As collators that concatenate do; it sees one pair alone as it should."""

    def lead(self, scores):
        half = len(scores) // 2
        return scores[half:] - scores[:half]


class LearnsFromRewards(LearnsFromPairs):
    READS: ClassVar = {
        "train_step": ("packed_input_ids", "prompt_mask", "packed_ref_logprobs", "rewards")
    }


def examine(cls):
    rehearsal = Rehearsal(lambda **changes: cls(**changes), usual_batches(cls()))
    LawChecks().test_a_step_moves_a_pair_apart(rehearsal)


def test_what_raises_the_chosen_sequence_passes():
    examine(LearnsFromPairs)


@pytest.mark.parametrize(
    ("cls", "finding"),
    [
        (PrefersTheRejected, "lead has grown by -"),
        (TakesTheFirstHalfForChosen, "lead has grown by -"),
        (AddsTheReference, "sign of the reference"),
    ],
)
def test_a_wrong_sign_is_found(cls, finding):
    with pytest.raises(Violation, match=finding):
        examine(cls)


def test_what_learns_from_rewards_is_skipped():
    with pytest.raises(pytest.skip.Exception):
        examine(LearnsFromRewards)


class ReportsPairs(LearnsFromPairs):
    METRICS: ClassVar = {
        "chosen_reward": ("reward", "mean reward of the chosen answers"),
        "rejected_reward": ("reward", "mean reward of the rejected answers"),
        "margin": ("reward", "mean reward of the chosen answer less that of the rejected one"),
        "right": ("share", "share of pairs whose chosen answer has the higher reward"),
    }

    def train_step(self, model, data, mb_spec):
        lengths = [[length - 1 for length in group] for group in data.seqlens["packed_input_ids"]]
        logprobs = model.module.forward(
            data, post_hook=lambda output, _: output.logprobs, output_seqlens=lengths
        )
        scores = self.scores(logprobs, data)
        chosen, rejected = scores[0::2], scores[1::2]
        return super().train_step(model, data, mb_spec) | {
            "chosen_reward": float(chosen.mean()),
            "rejected_reward": float(rejected.mean()),
            "margin": float((chosen - rejected).mean()),
            "right": self.right(chosen, rejected),
        }

    def right(self, chosen, rejected):
        return float((chosen > rejected).float().mean())


class LetsTiesBeRight(ReportsPairs):
    def right(self, chosen, rejected):
        return float((chosen >= rejected).float().mean())


class CountsTheRejected(ReportsPairs):
    def right(self, chosen, rejected):
        return float((chosen > 0).float().mean())


class ReportsTheRejectedTwice(ReportsPairs):
    def train_step(self, model, data, mb_spec):
        stats = super().train_step(model, data, mb_spec)
        return stats | {"chosen_reward": stats["rejected_reward"]}


def examine_stats(cls):
    rehearsal = Rehearsal(lambda **changes: cls(**changes), usual_batches(cls()))
    LawChecks().test_exchanged_pairs_exchange_what_is_reported(rehearsal)
    LawChecks().test_equal_sequences_are_not_in_the_right_order(rehearsal)


def test_what_is_reported_of_pairs_may_be_exchanged():
    examine_stats(ReportsPairs)


@pytest.mark.parametrize(
    ("cls", "finding"),
    [
        (LetsTiesBeRight, "right is 1 where chosen and rejected sequences are equal"),
        (CountsTheRejected, "right is .* exchanged"),
        (ReportsTheRejectedTwice, "_reward is .* exchanged"),
    ],
)
def test_a_wrong_number_of_pairs_is_found(cls, finding):
    with pytest.raises(Violation, match=finding):
        examine_stats(cls)
