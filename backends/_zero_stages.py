"""The training step under each ZeRO stage, and where the library keeps weights and moments in it.

Gradients are summed: a loss is multiplied by the number of ranks, over which the library averages,
and a step has one accumulation step, by which it would divide. The last micro-batch of a step is
marked as the library's boundary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rlcli.api.block_parts import BlockPart, flat_part
from rlcli.api.model import ModelSource
from rlcli.api.model_source import fill_tensor, parameter_places

from ._transformers import dimensions_in
from ._zero import DataRanks

if TYPE_CHECKING:
    from .deepspeed import DeepSpeed

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_stage(
    library: Any, packed: nn.Module, settings: DeepSpeed, config: Any, group: Any
) -> WholeState:
    """The stage of `settings` over the ranks of `group`, which must all call this."""
    stages = {0: WholeState, 1: DividedState, 2: DividedState, 3: DividedParameters}
    return stages[settings.zero_stage](library, packed, settings, config, group)


def divide_parameters(
    library: Any, lm: nn.Module, source: ModelSource, config: Any, group: Any, device: Any
) -> None:
    """For stage 3: read the parameters of a model on the meta device one by one, and keep this
    rank's part of each."""
    initializer = library.zero.Init(
        data_parallel_group=group, config_dict_or_path=config, dtype=torch.float32
    )
    for name, places in parameter_places(lm).items():
        first, attribute = places[0]
        empty = getattr(first, attribute)
        parameter = nn.Parameter(
            torch.empty_like(empty, device=device), requires_grad=empty.requires_grad
        )
        fill_tensor(parameter.detach(), source, name)
        initializer._zero_init_param(parameter)
        for module, attribute in places:
            setattr(module, attribute, parameter)


class WholeState:
    """Stage 0: every rank holds everything; gradients are reduced with the last micro-batch."""

    def __init__(self, library: Any, packed: Any, settings: DeepSpeed, config: Any, group: Any):
        self.settings = settings
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._sharers = group if self.ranks > 1 else None
        self.names = {parameter: name for name, parameter in packed.lm.named_parameters()}
        self.trained = [parameter for parameter in self.names if parameter.requires_grad]
        self._has_gradients = False
        groups = settings.groups(self.trained, dimensions_in(packed.lm, self._dim))
        optimizer = torch.optim.AdamW(groups, **settings.adamw(), fused=True)
        self.engine, self.optimizer, *_ = library.initialize(
            model=packed,
            optimizer=optimizer,
            config=config,
            mpu=DataRanks(group),
            dist_init_required=False,
        )

    def _dim(self, parameter: nn.Parameter) -> int:
        return parameter.dim()

    def close(self) -> None:
        self.engine.destroy()

    # -- a step ------------------------------------------------------------------------------------

    def forward(self, *args: Any) -> Any:
        return self.engine(*args) if torch.is_grad_enabled() else self.engine.module(*args)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        self._has_gradients = True
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss * self.ranks, scale_wrt_gas=False)

    def step(self) -> float:
        """Apply the gradients if their norm is finite; returns the norm."""
        norm = float(nn.utils.clip_grad_norm_(self.trained, self.settings.max_grad_norm))
        if math.isfinite(norm):
            self.engine.step()
            self._has_gradients = False
        return norm

    def drop_gradients(self) -> None:
        """Drop gradients that no step applied, in whatever state an exception left them."""
        if self._has_gradients:
            self._forget()
        self._has_gradients = False

    def _forget(self) -> None:
        self.engine.zero_grad()

    # -- weights and moments -----------------------------------------------------------------------

    def weights(self, on_this_rank: Mapping[str, Any]) -> dict[str, Any]:
        """Name → live weight; `on_this_rank` are those that the model has on this rank."""
        return dict(on_this_rank)

    def weights_changed(self) -> None:
        """Called after the tensors from `weights` were written to."""

    def make_moments(self) -> None:
        """Create the tensors that AdamW would create in its first step, before it."""
        for parameter in self._flat():
            if parameter not in self.inner.state:
                moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
                self.inner.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    **moments,
                }

    def moments(self) -> dict[str, Any]:
        """`<weight>/<moment>` → live tensor, or this rank's part; none before the first step."""
        return {
            f"{self.names[parameter]}/{moment}": tensor
            for parameter, state in self.inner.state.items()
            for moment, tensor in state.items()
        }

    def weight_tensors(self) -> list[torch.Tensor]:
        """All tensors that hold weights on this rank."""
        return [*self.names, *self.engine.module.buffers()]

    def optimizer_tensors(self) -> list[torch.Tensor]:
        """Everything that an update needs besides weights and gradients, in whatever form."""
        return [
            tensor
            for state in self.inner.state.values()
            for tensor in state.values()
            if tensor.dim()
        ]

    def scratch(self) -> list[torch.Tensor]:
        """Buffers that hold nothing between steps."""
        return []

    @property
    def inner(self) -> torch.optim.Optimizer:
        """AdamW itself."""
        return self.engine.basic_optimizer

    def _flat(self) -> list[torch.Tensor]:
        """The tensors that are AdamW's parameters."""
        return list(self.trained)


class DividedState(WholeState):
    """Stages 1 and 2: parameters are whole; a rank updates its part of a group's concatenated
    parameters."""

    def __init__(self, library: Any, packed: Any, settings: DeepSpeed, config: Any, group: Any):
        super().__init__(library, packed, settings, config, group)
        self._masters_are_views = not settings.offload_optimizer
        if self._masters_are_views:
            for master, weight in self._masters_and_weights():
                master.data = weight  # the library copied them, though they have the same dtype
            self._forget_copies()

    def _forget_copies(self) -> None:
        """Redirect each parameter's reference to its part of the copies,
        which would keep them alive."""
        for flat, parameters in zip(self._flat(), self.optimizer.bit16_groups, strict=True):
            for fragment in (parameter._hp_mapping for parameter in parameters):
                if fragment is not None:
                    address = fragment.hp_fragment_address
                    fragment.hp_fragment = flat.data.narrow(0, address.start, address.numel)

    def _masters_and_weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[n] of each group: what AdamW updates on this rank,
        and the same part of the model's parameters."""
        parts = (parts[self.rank] for parts in self.optimizer.parallel_partitioned_bit16_groups)
        return list(zip(self._flat(), parts, strict=True))

    def step(self) -> float:
        counts = {name: getattr(self.engine, name) for name in COUNTS}
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        if math.isfinite(norm):
            self._has_gradients = False
        else:
            for name, value in counts.items():
                setattr(self.engine, name, value)
        return norm

    def _forget(self) -> None:
        zero = self.optimizer
        zero.zero_grad()
        zero.micro_step_id = -1
        for gradients in (zero.averaged_gradients, zero.all_grad_tensors):
            gradients.update(dict.fromkeys(gradients))
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
        zero.extra_large_param_to_reduce.clear()
        zero._release_ipg_buffers()
        zero.params_already_reduced[:] = [False] * len(zero.params_already_reduced)
        zero._backward_hook_state.reset_for_new_step()
        zero._backward_active_depth = 0
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
            for flat in self._flat():
                if flat.grad is not None:
                    flat.grad.zero_()

    # -- weights and moments -----------------------------------------------------------------------

    def weights_changed(self) -> None:
        if not self._masters_are_views:
            for master, weight in self._masters_and_weights():
                master.data.copy_(weight)

    def moments(self) -> dict[str, Any]:
        moments: dict[str, Any] = {}
        for flat, parameters in zip(self._flat(), self.optimizer.bit16_groups, strict=True):
            for moment, tensor in self.inner.state.get(flat, {}).items():
                for parameter in parameters:
                    live = tensor if not tensor.dim() else self._part(parameter, tensor)
                    moments[f"{self.names[parameter]}/{moment}"] = live
        return moments

    def optimizer_tensors(self) -> list[torch.Tensor]:
        masters = [] if self._masters_are_views else self._flat()
        return super().optimizer_tensors() + masters

    def _part(self, parameter: torch.Tensor, flat: torch.Tensor) -> BlockPart:
        """This rank's part of a parameter, from its part of the flat tensor."""
        fragment = parameter._hp_mapping  # type: ignore[attr-defined]
        if fragment is None:
            return flat_part(parameter.shape, 0, flat[:0], self._sharers)
        address = fragment.hp_fragment_address
        values = flat.narrow(0, address.start, address.numel)
        return flat_part(parameter.shape, fragment.lp_fragment_address.start, values, self._sharers)

    def _flat(self) -> list[torch.Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)


class DividedParameters(DividedState):
    """Stage 3: a rank holds a range of every parameter,
    and the whole only while a module needs it."""

    def _dim(self, parameter: Any) -> int:
        return len(parameter.ds_shape)

    def _forget_copies(self) -> None:
        """Do nothing: here, no parameter references the copies."""

    def _masters_and_weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self._flat(), self.optimizer.fp16_partitioned_groups_flat, strict=True))

    def _forget(self) -> None:
        zero = self.optimizer
        zero.zero_grad()
        zero.averaged_gradients = {}
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        zero.params_already_reduced.update(dict.fromkeys(zero.params_already_reduced, False))
        zero._partition_all_parameters()
        zero._backward_hook_state.reset_for_new_step()
        zero._backward_active_depth = 0
        zero._offload_boundary_param_ids = set()
        zero.reset_cpu_buffers()

    # -- weights and moments -----------------------------------------------------------------------

    def weights(self, on_this_rank: Mapping[str, Any]) -> dict[str, Any]:
        parts = {
            name: self._range(parameter, parameter.ds_tensor)
            for parameter, name in self.names.items()
        }
        return dict(on_this_rank) | parts

    def weights_changed(self) -> None:
        super().weights_changed()
        self.optimizer._partition_all_parameters()
        if persistent := self.optimizer.persistent_parameters:
            persistent[0].all_gather(persistent)

    def moments(self) -> dict[str, Any]:
        moments: dict[str, Any] = {}
        for flat, parameters in zip(self._flat(), self.optimizer.fp16_groups, strict=True):
            for moment, tensor in self.inner.state.get(flat, {}).items():
                start = 0
                for parameter in parameters:
                    numbers = parameter.partition_numel()
                    live = (
                        self._range(parameter, tensor.narrow(0, start, numbers))
                        if tensor.dim()
                        else tensor
                    )
                    moments[f"{self.names[parameter]}/{moment}"] = live
                    start += numbers
        return moments

    def weight_tensors(self) -> list[torch.Tensor]:
        return super().weight_tensors() + [parameter.ds_tensor for parameter in self.names]

    def scratch(self) -> list[torch.Tensor]:
        buckets = [bucket.buffer for bucket in self.optimizer.ipg_buckets.values()]
        return [
            self.optimizer.grad_partitions_flat_buffer,
            *(buffer for buffer in buckets if buffer is not None),
        ]

    def _range(self, parameter: Any, values: torch.Tensor) -> BlockPart:
        """`values` [n] without the padding beyond the end of the parameter."""
        size = parameter.ds_numel
        start = min(size, self.rank * parameter.partition_numel())
        stop = min(size, start + parameter.partition_numel())
        return flat_part(
            torch.Size(parameter.ds_shape),
            start,
            values.detach().view(-1)[: stop - start],
            self._sharers,
        )

    def _flat(self) -> list[torch.Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)


COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""The library's step counters."""
