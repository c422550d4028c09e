"""What a training step is under each ZeRO stage, and where the library then keeps weights and moments.

Gradients are summed: a loss is multiplied by the number of ranks, over which the library averages, and one step has one
accumulation step, over which it would divide. The last micro-batch of a step is marked as the library's boundary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlcli.api.flat_parts import FlatPart

from ._zero import SMALLEST_BUCKET, Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_stage(library: Any, packed: nn.Module, settings: Any, group: Any, device: torch.device) -> WholeState:
    """The stage of `settings` over the ranks of `group`, all of which call it."""
    stages = {0: WholeState, 1: DividedState, 2: DividedState}
    return stages[settings.zero_stage](library, packed, settings, group, device)


class WholeState:
    """Stage 0: every rank holds everything; gradients are reduced with the last micro-batch."""

    def __init__(self, library: Any, packed: Any, settings: Any, group: Any, device: torch.device):
        self.settings = settings
        self.group = group
        self.ranks = dist.get_world_size(group)
        self._sharers = group if self.ranks > 1 else None
        self.device = device
        self.names = {parameter: name for name, parameter in packed.lm.named_parameters()}
        self.trained = [parameter for parameter in self.names if parameter.requires_grad]
        self._has_gradients = False
        optimizer = torch.optim.AdamW(settings.groups(self.names), **settings.adamw(), fused=True)
        self.engine, self.optimizer, *_ = library.initialize(
            model=packed, optimizer=optimizer, config=self._config(), mpu=Ranks(group), dist_init_required=False
        )

    def _config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self._limit_of_library,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.settings.zero_stage} | self._zero_config(),
        }

    @property
    def _limit_of_library(self) -> float:
        return 0.0  # without ZeRO the library clips, but does not say what the norm was

    def _zero_config(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.engine.destroy()

    # -- a step ----------------------------------------------------------------------------------------------

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
        """Gradients that no step took, in whatever state an exception left them."""
        if self._has_gradients:
            self._forget()
        self._has_gradients = False

    def _forget(self) -> None:
        self.engine.zero_grad()

    # -- weights and moments ---------------------------------------------------------------------------------

    def weights(self, whole: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """By name, live; `whole` are those that the model has on this rank."""
        return dict(whole)

    def weights_changed(self) -> None:
        """Somebody wrote into what `weights` gave."""

    def make_moments(self) -> None:
        """AdamW makes its tensors in its first step; these are the same, before it."""
        for parameter in self._flat():
            if parameter not in self.inner.state:
                made = {name: torch.zeros_like(parameter) for name in MOMENTS}
                self.inner.state[parameter] = {"step": torch.zeros((), device=parameter.device), **made}

    def moments(self) -> dict[str, Any]:
        """`<weight>/<moment>` → live tensor, or this rank's part; none before the first step."""
        return {
            f"{self.names[parameter]}/{moment}": tensor
            for parameter, held in self.inner.state.items()
            for moment, tensor in held.items()
        }

    @property
    def inner(self) -> torch.optim.Optimizer:
        """AdamW itself."""
        return self.engine.basic_optimizer

    def _flat(self) -> list[torch.Tensor]:
        """What AdamW takes for its parameters."""
        return list(self.trained)


class DividedState(WholeState):
    """Stages 1 and 2: parameters are whole; a rank updates a part of all parameters of a group, laid end to end."""

    def __init__(self, library: Any, packed: Any, settings: Any, group: Any, device: torch.device):
        super().__init__(library, packed, settings, group, device)
        self._masters_are_views = not settings.offload_optimizer
        if self._masters_are_views:
            for master, whole in self._masters_and_weights():
                master.data = whole  # the library copied them, though they are of one type

    @property
    def _limit_of_library(self) -> float:
        return self.settings.max_grad_norm

    def _zero_config(self) -> dict[str, Any]:
        numbers = sum(parameter.numel() for parameter in self.trained)
        largest = max(parameter.numel() for parameter in self.trained)
        bucket = 2 * -(-min(numbers, max(SMALLEST_BUCKET, largest)) // 2)
        offload = {"offload_optimizer": {"device": "cpu", "pin_memory": self.device.type != "cpu"}}
        return {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket} | (
            offload if self.settings.offload_optimizer else {}
        )

    def _masters_and_weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[n] of each group: what AdamW updates on this rank, and the same part of the model's parameters."""
        rank = dist.get_rank(self.group)
        parts = (parts[rank] for parts in self.optimizer.parallel_partitioned_bit16_groups)
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
        for held in (zero.averaged_gradients, zero.all_grad_tensors):
            held.update(dict.fromkeys(held))
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
                flat.grad.zero_()

    # -- weights and moments ---------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        if not self._masters_are_views:
            for master, whole in self._masters_and_weights():
                master.data.copy_(whole)

    def moments(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for flat, parameters in zip(self._flat(), self.optimizer.bit16_groups, strict=True):
            for moment, tensor in self.inner.state.get(flat, {}).items():
                for parameter in parameters:
                    live = tensor if not tensor.dim() else self._part(parameter, tensor)
                    found[f"{self.names[parameter]}/{moment}"] = live
        return found

    def _part(self, parameter: torch.Tensor, flat: torch.Tensor) -> FlatPart:
        """Of a parameter, what this rank has in its part of the line."""
        fragment = parameter._hp_mapping  # type: ignore[attr-defined]
        if fragment is None:
            return FlatPart(parameter.shape, 0, flat[:0], self._sharers)
        place = fragment.hp_fragment_address
        held = flat.narrow(0, place.start, place.numel)
        return FlatPart(parameter.shape, fragment.lp_fragment_address.start, held, self._sharers)

    def _flat(self) -> list[torch.Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)


COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""What the library counts of steps."""
