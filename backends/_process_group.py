"""A process group for libraries that cannot do without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def process_group(own: Any = None) -> Iterator[None]:
    """DeepSpeed and Megatron ask for the default process group all the time. A run of one rank has none; it is lent
    one, and has none again afterwards. With `own`, the group of a role that is on some of the run's ranks only, that is
    the default one."""
    before = dist.group.WORLD
    if before is not None and (own is None or dist.get_world_size(own) == dist.get_world_size()):
        yield
        return
    distributed_c10d._update_default_pg(own or _group_of_one())
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(before)


@cache
def _group_of_one() -> Any:
    on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
