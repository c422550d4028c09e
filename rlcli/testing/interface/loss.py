"""A loss function taken apart: its sums over a batch and over the batch's samples, and the gradient of each token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.micro_batches import one_per_sequence
from rlcli.testing.interface.recording_engine import HEADS, ForwardPass, TrainCall, WatchedEngine
from rlcli.testing.interface.training_trial import Rehearsal, TrainingOutcome, response_actions
from rlcli.testing.tiny_engine import TinyLM


@dataclass(frozen=True)
class Sums:
    """Results of a loss function and its weight for one micro-batch."""

    loss: float
    weight: float
    stats: dict[str, tuple[float, ...]]
    """(sum,) or (sum, count)"""


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
    """An optimizer step on several samples: the sums for all of them together, and for each alone."""
    call = max(result.engine.calls, key=lambda call: call.batch.bs)
    engine = WatchedEngine(TinyLM(seed=1))  # far from the trained model, so that clipping takes effect
    samples = [sums_of(engine, call, sample) for sample in call.batch.unpack()]
    return call, sums_of(engine, call, call.batch), samples


def is_sum(together: float, parts: Iterable[float]) -> bool:
    total = sum(parts)
    return abs(together - total) <= 1e-6 * max(1.0, abs(total))


def counts_tokens(rehearsal: Rehearsal) -> bool:
    """Whether the loss weight is a number of tokens: of all, of those with a predecessor, or of responses."""
    call = next(iter(rehearsal.result.engine.calls), None)
    if call is None:
        return False
    selected = rehearsal.batch.select_indices([rehearsal.batch.ids.index(id_) for id_ in call.batch.ids])
    tokens, response = selected.flat_seqlens("packed_input_ids"), response_actions(selected)
    counts = {sum(tokens), sum(tokens) - len(tokens), *([] if response is None else [int(response.sum())])}
    return float(call.loss_weight_fn(call.batch)) in counts


def cause_of_no_sum(together: Sums, parts: list[Sums]) -> str:
    """What the numbers look like instead."""
    weight = sum(sample.weight for sample in parts)
    mean_of_tokens = sum(sample.loss * sample.weight for sample in parts) / max(weight, 1.0)
    mean_of_samples = sum(sample.loss for sample in parts) / len(parts)
    advice = "return the sum; the engine divides by the weight, over all micro-batches and ranks"
    if is_sum(together.loss, [mean_of_tokens]):
        return f"it is a mean over tokens: {advice}"
    if is_sum(together.loss, [mean_of_samples]):
        return f"it is a mean over samples: {advice}"
    return (
        "the loss of a sample depends on what shares its micro-batch: compute what spans samples on the whole batch, "
        "before train_batch"
    )


def cause_unless_no_sum(result: TrainingOutcome, cause: str) -> str:
    """The cause of a dependence on the cut: primarily a loss that is not a sum, which is reported elsewhere."""
    _, together, parts = in_parts(result)
    if is_sum(together.loss, [sample.loss for sample in parts]) and is_sum(
        together.weight, [sample.weight for sample in parts]
    ):
        return cause
    return "it follows from a loss, or a loss weight, that is not a sum; see there"


@dataclass(frozen=True)
class TokenGradients:
    """One forward pass of a training step, by action."""

    size: torch.Tensor
    """[T - N]: size of the gradient that the model's output received at each action."""
    response: torch.Tensor
    """[T - N] bool: whether the action chose a token of a response."""
    lengths: list[int]
    """N lengths in tokens."""

    def responses(self) -> Iterator[torch.Tensor]:
        """The sizes for each response of two or more tokens that is trained on at all."""
        actions = [length - 1 for length in self.lengths]
        for size, response in zip(self.size.split(actions), self.response.split(actions), strict=True):
            if int(response.sum()) > 1 and bool(size[response].any()):
                yield size[response]


def token_gradients(rehearsal: Rehearsal, result: TrainingOutcome) -> list[TokenGradients]:
    """For every forward pass; empty if the batch does not distinguish prompts from responses."""
    batch = rehearsal.batch.select(key for key in ("packed_input_ids", "prompt_mask") if key in rehearsal.batch.keys)
    samples = {sample.ids[0]: sample for cut in (batch, one_per_sequence(batch)) for sample in cut.unpack()}
    gradients = []
    for forward_pass in result.engine.passes:
        selected = SequenceSample.gather([samples[id_] for id_ in forward_pass.ids])
        response = response_actions(selected)
        if response is None or selected.seqlens["packed_input_ids"] != forward_pass.lengths:
            continue
        gradients.append(TokenGradients(_by_action(forward_pass), response, selected.flat_seqlens("packed_input_ids")))
    return gradients


def _by_action(forward_pass: ForwardPass) -> torch.Tensor:
    lengths = [length for group in forward_pass.lengths for length in group]
    total = torch.zeros(sum(lengths) - len(lengths), dtype=torch.float64)
    for name in HEADS:
        gradient = forward_pass.gradient(name)
        if gradient is not None:
            per_token = len(gradient) != len(total)
            total += torch.cat([row[:-1] for row in gradient.split(lengths)]) if per_token else gradient
    return total
