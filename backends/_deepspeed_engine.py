"""The engine of backend deepspeed: a transformers model trained by a DeepSpeed engine of one ZeRO stage or another."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from rlcli.api.data import SequenceSample
from rlcli.api.engine_loop import TrainLoop
from rlcli.api.model import EngineState, ForwardEngine, Model, ModelOutput, PipelinableEngine

from ._engine import TransformersEngine
from ._process_group import process_group
from ._recomputation import RecomputedLayers
from ._zero import import_deepspeed, local_rank
from ._zero_stages import make_stage

if TYPE_CHECKING:
    from .deepspeed import DeepSpeed

T = TypeVar("T")


class DeepSpeedEngine(TransformersEngine, TrainLoop, PipelinableEngine):
    """A transformers model with AdamW under ZeRO."""

    def __init__(self, model: Model, settings: DeepSpeed):
        super().__init__(model, settings.dtype, settings.kv_cache_tokens)
        self.settings = settings
        self.total_steps = model.ft_spec.total_train_steps if model.ft_spec else 1
        self._recomputed = RecomputedLayers(self.lm) if settings.gradient_checkpointing else None
        library = import_deepspeed(self.device)
        with process_group(), local_rank(self.device):
            self._zero = make_stage(library, self.packed, settings, self._dp_group or dist.group.WORLD, self.device)

    def close(self) -> None:
        """Remove the library's hooks from the model."""
        self._zero.close()

    # -- training --------------------------------------------------------------------------------------------

    def forward_micro_batch(self, micro_batch: SequenceSample, then: Callable[[ModelOutput], T]) -> T:
        assert micro_batch.data is not None
        tokens = micro_batch.data["packed_input_ids"].to(self._device)
        lengths = tuple(micro_batch.flat_seqlens("packed_input_ids"))
        with self._recomputed.in_training_mode() if self._recomputed else nullcontext(), process_group():
            return self._zero.forward(tokens, lengths, then)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        with process_group():
            self._zero.backward(loss, is_last)

    def optimizer_zero_grad(self) -> None:
        self._zero.drop_gradients()

    def lr_scheduler_step(self, version_steps: int) -> float:
        rate = self.settings.rate(version_steps, self.total_steps)
        for group in self._zero.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def optimizer_step(self) -> float:
        with process_group():
            norm = self._zero.step()
        if not math.isfinite(norm):
            self._zero.drop_gradients()
        return norm

    # -- state -----------------------------------------------------------------------------------------------

    def state(self, room_for_optimizer: bool = False) -> EngineState:
        if room_for_optimizer:
            self._zero.make_moments()
        return EngineState(self._zero.weights(self.named_weights()), self._zero.moments())

    def state_was_filled(self, state: EngineState) -> None:
        self._weights_changed()

    def take_parameters(self, source: ForwardEngine, eta: float) -> None:
        super().take_parameters(source, eta)
        self._weights_changed()

    def _weights_changed(self) -> None:
        with process_group():
            self._zero.weights_changed()
