"""What the checks train for: losses that cover everything an output offers, and the same in a plain
loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import ModelOutput, TrainEngine
from rlcli.testing.backend.plain import (
    TEMPERATURE,
    Loss,
    Stats,
    acting,
    plain_answer_loss,
    plain_value_loss,
    value_targets,
)
from rlcli.testing.backend.samples import batch


def answer_loss(output: ModelOutput, sample: SequenceSample) -> Any:
    """Summed negative log-likelihood of the responses minus an entropy bonus, at a temperature."""
    output.temperature = TEMPERATURE
    output.actions = acting(sample)
    mask = output.actions.to(output.entropy.device)
    entropy = (output.entropy * mask).sum()
    stats = {"entropy": entropy, "response_length": (mask.sum(), number_of_sequences(sample))}
    return -(output.logprobs * mask).sum() - 0.1 * entropy, stats


def answer_weight(sample: SequenceSample) -> torch.Tensor:
    return acting(sample).sum()


def answer_stats(sample: SequenceSample) -> Stats:
    """What a step on a batch reports, whatever the model."""
    weight = float(answer_weight(sample))
    return {"loss_weight": weight, "response_length": weight / number_of_sequences(sample)}


def number_of_sequences(sample: SequenceSample) -> int:
    return len(sample.flat_seqlens("packed_input_ids"))


def value_loss(output: ModelOutput, sample: SequenceSample) -> torch.Tensor:
    return (output.values - value_targets(sample).to(output.values.device)).square().sum()


def value_weight(sample: SequenceSample) -> int:
    return sum(sample.flat_seqlens("packed_input_ids"))


def value_stats(sample: SequenceSample) -> Stats:
    return {"loss_weight": float(value_weight(sample))}


@dataclass(frozen=True)
class Objective:
    """The targets for which the checks train a head."""

    loss: Any
    weight: Callable[[SequenceSample], Any]
    plain: Loss
    """The same in a plain loop."""
    stats: Callable[[SequenceSample], Stats]
    """Numbers among those that a step on a batch reports, each with a weight of its own."""


OBJECTIVES = {
    "lm": Objective(answer_loss, answer_weight, plain_answer_loss, answer_stats),
    "value": Objective(value_loss, value_weight, plain_value_loss, value_stats),
}
"""By head."""


def train(
    engine: TrainEngine,
    step: int | None = None,
    sample: SequenceSample | None = None,
    objective: Objective = OBJECTIVES["lm"],
    **how: Any,
) -> Stats:
    """One step, by default the first one whatever the schedule, and on a batch of its own."""
    sample = batch(step or 0) if sample is None else sample
    return engine.train_batch(sample, objective.loss, objective.weight, version_steps=step, **how)
