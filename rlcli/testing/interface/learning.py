"""The check that a few steps on a toy problem achieve their goal."""

from __future__ import annotations

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import PROMPT_MASK, REFERENCE, SEQUENCES
from rlcli.api.model import Model, call_interface
from rlcli.testing.contract import Violation, skip_if
from rlcli.testing.interface.actions import trained_actions
from rlcli.testing.interface.invariants import SIGNALS
from rlcli.testing.interface.loss import counts_tokens
from rlcli.testing.interface.training_trial import InterfaceSubject, Rehearsal, outputs_of_actions

STEPS = 12
LEARNING_RATES = (0.1, 1e-3, 1e-5)
"""Tried in turn until the loss does not diverge: that of a steep one does where others learn."""
DIVERGED = 2
"""Times its first size, from which on a loss counts as diverged."""


class LearningChecks(InterfaceSubject):
    def test_it_learns(self, rehearsal: Rehearsal) -> None:
        """a few steps lower its loss, or raise the likelihood of answers that nothing rates"""
        skip_if(
            set(SIGNALS) & rehearsal.batch.keys and rehearsal.heads == {"lm"},
            "learns what is rewarded, which has its own check",
        )
        batch, imitates = rehearsal.batch, _imitates(rehearsal)
        for lr in LEARNING_RATES:
            model = rehearsal.model(lr=lr)
            before = _logprob(model, batch) if imitates else None
            losses = _losses(rehearsal, model)
            if losses[-1] <= DIVERGED * abs(losses[0]):
                break
        name, start, end = "minus the loss", -losses[0], -losses[-1]
        is_better = end > start
        if before is not None:
            name, start, end = "the log-prob of responses", before, _logprob(model, batch)
            is_better = end > start or _learns_one(rehearsal, lr)
        if not is_better:
            raise Violation(
                f"{STEPS} steps take {name} from {start:.4g} to {end:.4g}; it should rise",
                "check the sign of the loss, and whether targets move away from what is learned",
                rehearsal.where,
            )


def _losses(rehearsal: Rehearsal, model: Model) -> list[float]:
    """The loss in each of a few steps, which train the model."""
    batch, interface = rehearsal.batch, rehearsal.make()
    losses = [call_interface(interface, "train_step", model, batch)["loss"]]
    for _ in range(STEPS - 1):
        sampled = _with_the_same_reference(batch, rehearsal.fit(batch, model, interface))
        losses.append(call_interface(interface, "train_step", model, sampled)["loss"])
    return losses


def _with_the_same_reference(batch: SequenceSample, sampled: SequenceSample) -> SequenceSample:
    """The policy changes from step to step, its reference does not."""
    if REFERENCE in batch.keys:
        sampled.data[REFERENCE] = batch.data[REFERENCE]
    return sampled


def _imitates(rehearsal: Rehearsal) -> bool:
    """Whether all responses are to become likelier: no other key may define what is good, and the
    loss is a sum over tokens."""
    return set(rehearsal.batch.keys) == {SEQUENCES, PROMPT_MASK} and counts_tokens(rehearsal)


def _learns_one(rehearsal: Rehearsal, lr: float) -> bool:
    """Whether a few steps make a single response likelier: of several, an objective may favour
    likely tokens at the expense of unlikely ones, and so of the log-prob."""
    batch, model, interface = (
        rehearsal.batch.select_indices([0]),
        rehearsal.model(lr=lr),
        rehearsal.make(),
    )
    before = _logprob(model, batch)
    for _ in range(STEPS):
        call_interface(interface, "train_step", model, batch)
    return _logprob(model, batch) > before


@torch.no_grad()
def _logprob(model: Model, batch: SequenceSample) -> float:
    """The mean log-prob of the tokens of responses."""
    return float(outputs_of_actions(model, batch, "logprobs")[trained_actions(batch)].mean())
