"""The check that a few steps on a toy problem achieve their goal."""

from __future__ import annotations

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import Model, call_interface
from rlcli.testing.contract import Violation, place_of
from rlcli.testing.interface.actions import per_action, trained_actions
from rlcli.testing.interface.loss import counts_tokens
from rlcli.testing.interface.training_trial import InterfaceSubject, Rehearsal

STEPS = 12
REFERENCE = "packed_ref_logprobs"


class LearningChecks(InterfaceSubject):
    def test_it_learns(self, rehearsal: Rehearsal) -> None:
        """a few steps lower its loss, or raise what is rewarded"""
        batch, model, interface = rehearsal.batch, rehearsal.model(lr=0.1), rehearsal.make()
        heads = rehearsal.result.engine.heads
        before = _policy_gain(rehearsal, model) if heads == {"lm"} else None
        losses = [call_interface(interface, "train_step", model, batch)["loss"]]
        for _ in range(STEPS - 1):
            sampled = _with_the_same_reference(batch, rehearsal.fit(batch, model, interface))
            losses.append(call_interface(interface, "train_step", model, sampled)["loss"])
        after = _policy_gain(rehearsal, model) if heads == {"lm"} else None
        if before is not None and after is not None:
            if not any(after[quantity] > start for quantity, start in before.items()):
                quantity, start = next(iter(before.items()))
                raise Violation(
                    (
                        f"{STEPS} steps take {quantity} from {start:.4g} to "
                        f"{after[quantity]:.4g}; it should rise"
                    ),
                    "check the sign of the loss: it is minimised",
                    place_of(rehearsal.train_step),
                )
        elif not losses[-1] < losses[0]:
            raise Violation(
                (
                    f"{STEPS} steps on one batch take the loss from "
                    f"{losses[0]:.4g} to {losses[-1]:.4g}"
                ),
                "check the sign of the loss, and whether targets move away from what is learned",
                place_of(rehearsal.train_step),
            )


def _with_the_same_reference(batch: SequenceSample, sampled: SequenceSample) -> SequenceSample:
    """The policy changes from step to step, its reference does not."""
    if REFERENCE in batch.keys:
        sampled.data[REFERENCE] = batch.data[REFERENCE]
    return sampled


@torch.no_grad()
def _policy_gain(rehearsal: Rehearsal, model: Model) -> dict[str, float] | None:
    """What training should raise, at least one of them: the log-prob of responses; with rewards or
    advantages, the margin by which it is higher where they are, or the log-prob of these tokens,
    since likelihood alone makes all similar ones likelier too.

    None if the batch has other keys that may define what is good,
    or the loss is not a sum over tokens.
    """
    batch = rehearsal.batch
    trained = trained_actions(batch)
    if trained is None:
        return None
    shift = [[length - 1 for length in group] for group in batch.seqlens["packed_input_ids"]]
    scores = model.module.forward(
        batch, post_hook=lambda output, _: output.logprobs, output_seqlens=shift
    )
    better = _better_actions(batch, trained)
    if better is None:
        is_known = set(batch.keys) == {"packed_input_ids", "prompt_mask"} and counts_tokens(
            rehearsal
        )
        return (
            {"the mean log-prob of responses": float(scores[trained].mean())} if is_known else None
        )
    rewarded, unrewarded = scores[trained & better].mean(), scores[trained & ~better].mean()
    return {
        "the lead in log-prob of rewarded tokens": float(rewarded - unrewarded),
        "the log-prob of rewarded tokens": float(rewarded),
    }


def _better_actions(batch: SequenceSample, trained: torch.Tensor) -> torch.Tensor | None:
    """[T - N] bool: the actions with an advantage, or in a response with a reward, above the mean;
    None without any."""
    if "advantages" in batch.keys:
        advantages: torch.Tensor = batch.data["advantages"]
        return advantages > advantages[trained].mean()
    if "rewards" in batch.keys:
        rewards: torch.Tensor = batch.data["rewards"].float()
        return per_action(batch, rewards > rewards.mean())
    return None
