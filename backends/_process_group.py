"""A default process group for libraries that require one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined]

from rlcli.api.network import LOOPBACK


@contextmanager
def process_group(group: Any = None) -> Iterator[None]:
    """Temporarily install the default process group that DeepSpeed and Megatron require, then
    restore the previous state. A run of one rank has none and gets a group of one. `group`: the
    group of a role that is on only some of the run's ranks, which then is the default."""
    before = dist.group.WORLD
    if before is not None and (
        group is None or dist.get_world_size(group) == dist.get_world_size()
    ):
        yield
        return
    distributed_c10d._update_default_pg(group or _group_of_one())
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(before)


@cache
def _group_of_one() -> Any:
    # else it listens on the address that the host's name has
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group("nccl" if on_gpu else "gloo", store=HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
