"""Engines without their own schedule: one micro-batch after the other."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.engine import ForwardEngine, Hook, LossFn, ModelOutput, TrainEngine
from rlcli.api.loss_stats import Stats, read_loss
from rlcli.api.micro_batches import MicroBatch

T = TypeVar("T")


class ForwardLoop(ForwardEngine):
    """One forward pass at a time."""

    @abc.abstractmethod
    def forward_micro_batch(
        self, micro_batch: SequenceSample, then: Callable[[ModelOutput], T]
    ) -> T:
        """Run the model on `packed_input_ids` and return `then(output)`;
        gradients flow if grad mode is on."""

    def forward_batch(self, micro_batches: Sequence[MicroBatch], hook: Hook[T]) -> list[T]:
        results = []
        for micro_batch in micro_batches:
            sample = micro_batch.sample
            if micro_batch.is_idle:
                self.forward_micro_batch(sample, _zero)
            else:
                results.append(self.forward_micro_batch(sample, _for(sample, hook)))
        return results


class TrainLoop(ForwardLoop, TrainEngine):
    """One forward and backward pass at a time."""

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Accumulate gradients; across ranks they are summed, not averaged.

        `is_last`: no other micro-batch of this optimizer step comes after it.
        """

    def forward_backward_batch(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn, divisor: torch.Tensor
    ) -> list[Stats]:
        collected: list[Stats] = []
        for number, micro_batch in enumerate(micro_batches, start=1):
            loss, sums = self.loss_of(micro_batch, loss_fn, divisor)
            collected.append(sums)
            self.backward(loss, is_last=number == len(micro_batches))
        return collected

    def loss_of(
        self, micro_batch: MicroBatch, loss_fn: LossFn, divisor: torch.Tensor
    ) -> tuple[torch.Tensor, Stats]:
        """The scalar from which the backward pass of a micro-batch starts, and the stats of its
        loss."""
        sample = micro_batch.sample
        if micro_batch.is_idle:
            return self.forward_micro_batch(sample, _zero), {}
        loss, sums = read_loss(self.forward_micro_batch(sample, _for(sample, loss_fn)))
        return loss / divisor.to(loss.dtype), sums


def _for(sample: SequenceSample, hook: Hook[T]) -> Callable[[ModelOutput], T]:
    return lambda output: hook(output, sample)


def _zero(output: ModelOutput) -> torch.Tensor:
    return output.zero
