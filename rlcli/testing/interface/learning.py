"""The check that a few steps on a toy problem achieve their goal."""

from __future__ import annotations

import operator

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import PROMPT_MASK, REFERENCE, SEQUENCES
from rlcli.api.model import Model, call_interface
from rlcli.testing.contract import Violation
from rlcli.testing.interface.actions import trained_actions
from rlcli.testing.interface.invariants import SIGNALS
from rlcli.testing.interface.loss import counts_tokens
from rlcli.testing.interface.training_trial import InterfaceSubject, Rehearsal, outputs_of_actions

STEPS = 12


class LearningChecks(InterfaceSubject):
    def test_it_learns(self, rehearsal: Rehearsal) -> None:
        """a few steps lower its loss, or raise the likelihood of answers that nothing rates"""
        batch, model, interface = rehearsal.batch, rehearsal.model(lr=0.1), rehearsal.make()
        if set(SIGNALS) & set(batch.keys) and rehearsal.result.engine.heads == {"lm"}:
            pytest.skip("learns what is rewarded, which has its own check")
        before = _likelihoods(rehearsal, model)
        losses = [call_interface(interface, "train_step", model, batch)["loss"]]
        for _ in range(STEPS - 1):
            sampled = _with_the_same_reference(batch, rehearsal.fit(batch, model, interface))
            losses.append(call_interface(interface, "train_step", model, sampled)["loss"])
        name, start, end = "minus the loss", -losses[0], -losses[-1]
        is_better = end > start
        after = _likelihoods(rehearsal, model)
        if before is not None and after is not None:
            name, start, end = "the log-prob of responses", before[0], after[0]
            is_better = any(map(operator.gt, after, before))
        if not is_better:
            raise Violation(
                f"{STEPS} steps take {name} from {start:.4g} to {end:.4g}; it should rise",
                "check the sign of the loss, and whether targets move away from what is learned",
                rehearsal.where,
            )


def _with_the_same_reference(batch: SequenceSample, sampled: SequenceSample) -> SequenceSample:
    """The policy changes from step to step, its reference does not."""
    if REFERENCE in batch.keys:
        sampled.data[REFERENCE] = batch.data[REFERENCE]
    return sampled


@torch.no_grad()
def _likelihoods(rehearsal: Rehearsal, model: Model) -> tuple[float, float] | None:
    """The mean log-prob and the mean probability of the tokens of responses, which an objective may
    raise at the other's expense; None if other keys may define what is good, or the loss is not a
    sum over tokens."""
    batch = rehearsal.batch
    if set(batch.keys) != {SEQUENCES, PROMPT_MASK} or not counts_tokens(rehearsal):
        return None
    logprobs = outputs_of_actions(model, batch, "logprobs")[trained_actions(batch)]
    return float(logprobs.mean()), float(logprobs.exp().mean())
