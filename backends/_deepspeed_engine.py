"""The engine of backend deepspeed: a transformers model trained by a DeepSpeed engine of any ZeRO
stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlcli.api.block_parts import BlockPart
from rlcli.api.model import EngineState, GivesParameters, Model, PipelinableEngine

from ._engine import TransformersEngine
from ._put_away import PutAway, copied_to_host, copy_into
from ._recomputation import recomputed_layers
from ._routed_training import RoutedTraining, routers_of
from ._zero import configuration, import_deepspeed, own_group, surroundings
from ._zero_stages import divide_parameters, make_stage

if TYPE_CHECKING:
    from .deepspeed import DeepSpeed


class DeepSpeedEngine(TransformersEngine, RoutedTraining, PipelinableEngine):
    """A transformers model with AdamW under ZeRO."""

    def __init__(self, model: Model, settings: DeepSpeed):
        self.settings = settings
        super().__init__(model, settings)
        self.routers = routers_of(self.lm, self.role, settings)
        self.total_steps = model.ft_spec.total_train_steps if model.ft_spec else 1
        with self._surroundings():
            self._zero = make_stage(self._library, self.packed, settings, self._config, self._group)
        self._away_weights, self._away_optimizer = PutAway(), PutAway()

    def _lay_out(self, model: Model) -> None:
        self._library = import_deepspeed(self.device)
        self._own_group = own_group(model.device_mesh)
        self._config = configuration(
            self.settings, [p.shape for p in self.lm.parameters()], self.device
        )
        self._recomputed = recomputed_layers(self.lm, self.settings)
        if self.is_sharded:
            source = model.required_source
            with self._surroundings():
                divide_parameters(
                    self._library, self.lm, source, self._config, self._group, self.device
                )

    @property
    def is_sharded(self) -> bool:
        return self.settings.zero_stage == 3

    def _surroundings(self) -> AbstractContextManager[None]:
        return surroundings(self._own_group, self.device)

    @property
    def _group(self) -> dist.ProcessGroup:
        """The role's data-parallel ranks, within the library's surroundings,
        where there is always such a group."""
        group = self._own_group or dist.group.WORLD
        assert group is not None
        return group

    def close(self) -> None:
        """Remove the library's hooks from the model."""
        with self._surroundings():
            self._zero.close()

    # -- training ----------------------------------------------------------------------------------

    @contextmanager
    def _in_pass(self) -> Iterator[None]:
        recomputed = self._recomputed.in_training_mode() if self._recomputed else nullcontext()
        with recomputed, self._surroundings():
            yield

    def _compute(self, *inputs: Any) -> Any:
        return self._zero.forward(*inputs)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        with self._surroundings():
            self._zero.backward(loss, is_last)

    def optimizer_zero_grad(self) -> None:
        with self._surroundings():
            self._zero.drop_gradients()

    def lr_scheduler_step(self, version_steps: int) -> float:
        rate = self.settings.rate(version_steps, self.total_steps)
        for group in self._zero.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def optimizer_step(self) -> float:
        with self._surroundings():
            self._away_optimizer.bring_back()
            norm = self._zero.step()
            if not math.isfinite(norm):
                self._zero.drop_gradients()
        return norm

    # -- weights -----------------------------------------------------------------------------------

    def named_weights(self) -> dict[str, torch.Tensor | BlockPart]:
        self._onload()
        return self._zero.weights(super().named_weights())

    def _held_parameters(self) -> dict[str, Any]:
        names = {name for name, _ in self.lm.named_parameters()}
        return {name: weight for name, weight in self.named_weights().items() if name in names}

    def take_parameters(self, source: GivesParameters, eta: float) -> None:
        super().take_parameters(source, eta)
        self._weights_changed()

    def _gathered_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.whole_parameters() if self.is_sharded else super()._gathered_parameters()

    def _outline(self) -> Any:
        return self._copy.lm if self._copy is not None else super()._outline()

    def offload(self) -> None:
        """Weights are restored by the next pass, the optimizer's state by the next step."""
        self._away_weights.put_away(
            self._on_device(self._zero.weight_tensors()), self._zero.scratch()
        )
        self._offload_optimizer()

    def _offload_optimizer(self) -> None:
        self._away_optimizer.put_away(self._on_device(self._zero.optimizer_tensors()))

    def _on_device(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor for tensor in tensors if tensor.device.type == self._device.type]

    @contextmanager
    def _brought_back(self) -> Iterator[bool]:
        """Bring everything to the device, and offload it again at the end;
        yields whether anything was offloaded."""
        with_weights, with_optimizer = self._away_weights.is_away, self._away_optimizer.is_away
        self._onload()
        self._away_optimizer.bring_back()
        try:
            yield with_weights or with_optimizer
        finally:
            if with_weights:
                self.offload()
            elif with_optimizer:
                self._offload_optimizer()

    def _onload(self) -> None:
        self._away_weights.bring_back()

    # -- state -------------------------------------------------------------------------------------

    def state(self, room_for_optimizer: bool = False) -> EngineState:
        """Live tensors; of an offloaded engine, copies on the host,
        for which the device is only used meanwhile."""
        with self._brought_back() as was_away:
            if room_for_optimizer:
                self._zero.make_moments()
            state = self._live_state()
            return copied_to_host(state) if was_away else state

    def _live_state(self) -> EngineState:
        return EngineState(self.named_weights(), self._zero.moments())

    def state_was_filled(self, state: EngineState) -> None:
        with self._brought_back():
            if state.is_copy:
                copy_into(self._live_state(), state)
            self._weights_changed()

    def _weights_changed(self) -> None:
        with self._surroundings():
            self._zero.weights_changed()
