"""A loss function taken apart: its sums over a batch and over the batch's samples,
and the gradient of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlcli.api.data import SequenceSample
from rlcli.testing.interface.actions import action_counts, trained_actions
from rlcli.testing.interface.recording_engine import HEADS, ForwardPass, TrainCall, WatchedEngine
from rlcli.testing.interface.training_trial import Rehearsal, TrainingOutcome, is_close
from rlcli.testing.tiny_engine import TinyLM

WEIGHT = "loss weight"


@dataclass(frozen=True)
class Sums:
    """Results of a loss function and its weight for one micro-batch."""

    loss: float
    weight: float
    stats: dict[str, tuple[float, ...]]
    """(sum,) or (sum, count)"""

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        """All of them by name."""
        return {"loss": (self.loss,), WEIGHT: (self.weight,), **self.stats}


@torch.no_grad()
def sums_of(engine: WatchedEngine, call: TrainCall, batch: SequenceSample) -> Sums:
    result = engine.forward_micro_batch(batch, lambda output: call.loss_fn(output, batch))
    loss, stats = result if isinstance(result, tuple) else (result, {})
    pairs = {name: value if isinstance(value, tuple) else (value,) for name, value in stats.items()}
    return Sums(
        float(loss),
        float(call.loss_weight_fn(batch)),
        {name: tuple(float(number) for number in pair) for name, pair in pairs.items()},
    )


def in_parts(result: TrainingOutcome) -> tuple[TrainCall, Sums, list[Sums]]:
    """An optimizer step on several samples: the sums for all of them together,
    and for each alone."""
    call = max(result.engine.calls, key=lambda call: call.batch.bs)
    # far from the trained model, so that clipping takes effect
    engine = WatchedEngine(TinyLM(seed=1))
    samples = [sums_of(engine, call, sample) for sample in call.batch.unpack()]
    return call, sums_of(engine, call, call.batch), samples


def counts_tokens(rehearsal: Rehearsal) -> bool:
    """Whether the loss weight is a number of tokens: of all, of those with a predecessor, or of
    those trained on."""
    call = next(iter(rehearsal.result.engine.calls), None)
    if call is None:
        return False
    selected = rehearsal.batch.select_indices(
        [rehearsal.batch.ids.index(id_) for id_ in call.batch.ids]
    )
    tokens, trained = selected.flat_seqlens("packed_input_ids"), trained_actions(selected)
    counts = {
        sum(tokens),
        sum(tokens) - len(tokens),
        *([] if trained is None else [int(trained.sum())]),
    }
    return float(call.loss_weight_fn(call.batch)) in counts


def cause_of_no_sum(name: str, together: Sums, parts: list[Sums]) -> str:
    """What the numbers look like instead."""
    if name == WEIGHT:
        return "return a count: how many tokens the loss is a sum over"
    if name != "loss":
        return "report sums, which the engine divides by the loss weight, or pairs (sum, count)"
    weight = sum(sample.weight for sample in parts)
    mean_of_tokens = sum(sample.loss * sample.weight for sample in parts) / max(weight, 1.0)
    mean_of_samples = sum(sample.loss for sample in parts) / len(parts)
    advice = "return the sum; the engine divides by the weight, over all micro-batches and ranks"
    if is_close(together.loss, mean_of_tokens):
        return f"it is a mean over tokens: {advice}"
    if is_close(together.loss, mean_of_samples):
        return f"it is a mean over samples: {advice}"
    return (
        "the loss of a sample depends on what shares its micro-batch: compute what spans samples "
        "on the whole batch, before train_batch"
    )


def cause_unless_no_sum(result: TrainingOutcome, cause: str) -> str:
    """The cause of a dependence on the cut: primarily a loss that is not a sum,
    which is reported elsewhere."""
    _, together, parts = in_parts(result)
    loss, weight = sum(part.loss for part in parts), sum(part.weight for part in parts)
    if is_close(together.loss, loss) and is_close(together.weight, weight):
        return cause
    return "it follows from a loss, or a loss weight, that is not a sum; see there"


@dataclass
class TokenGradients:
    """A sequence in the forward passes of a training step."""

    trained: torch.Tensor
    """[A] bool: which of its actions are trained on."""
    size: torch.Tensor
    """[A]: size of the gradient that the model's output received at each action,
    over all passes."""


def token_gradients(batch: SequenceSample, result: TrainingOutcome) -> list[TokenGradients]:
    """For every sequence of the batch; those with the same tokens are taken together. Empty if the
    batch does not say what is trained on, or the model saw none of its sequences as they are."""
    trained = trained_actions(batch)
    if trained is None:
        return []
    lengths = batch.flat_seqlens("packed_input_ids")
    masks = trained.split(action_counts(batch))
    entries: dict[tuple[int, ...], TokenGradients] = {}
    for tokens, mask in zip(batch.data["packed_input_ids"].split(lengths), masks, strict=True):
        entry = entries.setdefault(
            tuple(tokens.tolist()), TokenGradients(mask, torch.zeros(len(mask)).double())
        )
        entry.trained = entry.trained | mask
    is_seen = False
    for forward_pass in result.engine.passes:
        actions = [len(tokens) - 1 for tokens in forward_pass.sequences]
        for tokens, size in zip(
            forward_pass.sequences, _by_action(forward_pass).split(actions), strict=True
        ):
            if (seen := entries.get(tuple(tokens.tolist()))) is not None:
                seen.size += size
                is_seen = True
    return list(entries.values()) if is_seen else []


def gradients_of(result: TrainingOutcome, output: str, rows: int) -> torch.Tensor | None:
    """The gradient that an output of the model received in the first pass of a step that asked for
    it; None unless that has this number of rows."""
    gradients = (each.signed_gradient(output) for each in result.engine.passes)
    first = next((gradient for gradient in gradients if gradient is not None), None)
    return first if first is not None and len(first) == rows else None


def _by_action(forward_pass: ForwardPass) -> torch.Tensor:
    lengths = [len(tokens) for tokens in forward_pass.sequences]
    total = torch.zeros(sum(lengths) - len(lengths), dtype=torch.float64)
    for name in HEADS:
        gradient = forward_pass.gradient(name)
        if gradient is not None:
            per_token = len(gradient) != len(total)
            total += (
                torch.cat([row[:-1] for row in gradient.split(lengths)]) if per_token else gradient
            )
    return total
