"""DeepSpeed as a library: imported without its side effects, configured,
and limited to the ranks of one role."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ._deepspeed_memory import bucket_of
from ._process_group import process_group

if TYPE_CHECKING:
    from .deepspeed import DeepSpeed


def import_deepspeed(device: torch.device) -> Any:
    """Import the library, without letting it look for a device, write to stdout, or compile a
    shared-memory kernel on CPUs."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device.type == "cpu" else device.type)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger = logging.getLogger("DeepSpeed")
    logger.handlers.clear()
    logger.propagate = True
    renamed = "`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    return deepspeed


def configuration(
    settings: DeepSpeed, shapes: Sequence[torch.Size], device: torch.device
) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize` of a model whose parameters have these
    shapes."""
    sizes = [shape.numel() for shape in shapes]
    bucket = bucket_of(sum(sizes), max(sizes))
    zero: dict[str, Any] = {
        "stage": settings.zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if settings.zero_stage == 3:
        # A memory-efficient linear layer would replace torch's own, for all models of this process.
        zero |= {"stage3_prefetch_bucket_size": bucket, "memory_efficient_linear": False}
        # The library would keep a billion gathered numbers from a forward pass to its backward
        # pass.
        zero |= {"stage3_max_reuse_distance": bucket, "stage3_max_live_parameters": 2 * bucket}
        # Vectors stay whole: gathering them would cost more than it saves.
        zero["stage3_param_persistence_threshold"] = max(
            (shape.numel() for shape in shapes if len(shape) < 2), default=0
        )
    host = {"device": "cpu", "pin_memory": device.type != "cpu"}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = host
    if settings.offload_parameters:
        zero["offload_param"] = host
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Without ZeRO, the library clips but does not report the norm, so the engine clips.
        "gradient_clipping": settings.max_grad_norm if settings.zero_stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def own_group(mesh: Any) -> Any:
    """A role's group of data-parallel ranks, even if only one of several in the run;
    None in a run of one rank."""
    if mesh is not None:
        return mesh["dp"].get_group()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


@contextmanager
def surroundings(group: Any, device: torch.device) -> Iterator[None]:
    """Temporarily provide what the library requires: a default process group, which is the role's
    own, and the number of the device in the environment."""
    before = os.environ.get("LOCAL_RANK")
    with process_group(group):
        os.environ["LOCAL_RANK"] = str(device.index or 0)
        try:
            yield
        finally:
            os.environ.pop("LOCAL_RANK")
            if before is not None:
                os.environ["LOCAL_RANK"] = before


class DataRanks:
    """The interface of a Megatron-like `mpu` for DeepSpeed: the data-parallel ranks of one role,
    without any other parallelism."""

    def __init__(self, group: Any):
        self._group = group

    def get_data_parallel_group(self) -> Any:
        return self._group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._group)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._group)

    def get_model_parallel_group(self) -> None:
        return None

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0
