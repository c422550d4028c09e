"""A process group for libraries that cannot do without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def process_group() -> Iterator[None]:
    """DeepSpeed and Megatron ask for the default process group all the time. A run of one rank has none; it is lent
    one, and has none again afterwards."""
    if dist.is_initialized():
        yield
        return
    global _lent
    if _lent is None:
        on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        _lent = distributed_c10d._get_default_group()
    else:
        distributed_c10d._update_default_pg(_lent)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(None)


_lent: Any = None
