"""Offloading of a Megatron engine: its memory is released while other roles use the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ._megatron_model import StageModel
from ._megatron_optimizer import ShardedAdamW
from ._put_away import PutAway


class Offloading:
    """Puts tensors of a stage away, each kind until it is needed again."""

    def __init__(self, chunks: Sequence[StageModel], optimizer: ShardedAdamW):
        self._chunks = chunks
        self._optimizer = optimizer
        self.weights = PutAway()
        """Needed by every pass."""
        self.gradients = PutAway()
        """The gradient buffer, needed by the passes of a training step."""
        self.optimizer_state = PutAway()
        """Needed by the update at the end of a training step."""

    def put_away(self) -> None:
        self.weights.put_away(self._tensors())
        self.gradients.put_away((), self._optimizer.gradient_buffers())
        self._put_optimizer_away()

    def bring_back(self) -> None:
        """Bring weights back, and the optimizer's state, which holds the trained values if
        parameters are rounded."""
        self.weights.bring_back()
        self.optimizer_state.bring_back()

    @contextmanager
    def brought_back(self) -> Iterator[None]:
        """Bring weights and optimizer's state back; at the end, put away what was away."""
        with_weights, with_optimizer = self.weights.is_away, self.optimizer_state.is_away
        self.bring_back()
        try:
            yield
        finally:
            if with_weights:
                self.put_away()
            elif with_optimizer:
                self._put_optimizer_away()

    def _tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._chunks:
            yield from chunk.parameters()
            yield from chunk.buffers()

    def _put_optimizer_away(self) -> None:
        self.optimizer_state.put_away(self._optimizer.kept_tensors())
