"""DeepSpeed as a library: imported without its habits, configured, and kept to the ranks of one role."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rlcli.errors import UsageError

SMALLEST_BUCKET = 2**26
"""Elements that are reduced or gathered at once: 256 MB of float32."""


def import_deepspeed(device: torch.device) -> Any:
    """The library. It would look for a device, write to stdout, and compile a kernel for shared memory on CPUs; it does
    none of that here. Raises UsageError if it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device.type == "cpu" else device.type)
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise UsageError(
            "backend deepspeed needs DeepSpeed, which is not installed", hint="pip install 'rlcli[deepspeed]'"
        ) from error
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger = logging.getLogger("DeepSpeed")
    logger.handlers.clear()
    logger.propagate = True
    return deepspeed


@contextmanager
def local_rank(device: torch.device) -> Iterator[None]:
    """The library takes the number of its device from the environment."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_RANK")
        if before is not None:
            os.environ["LOCAL_RANK"] = before


class Ranks:
    """What DeepSpeed asks a Megatron-like `mpu`: these are the data-parallel ranks of one role, and there is no other
    parallelism."""

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
