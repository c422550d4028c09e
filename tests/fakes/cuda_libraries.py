"""Libraries that decide once per process whether it has CUDA devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def deepspeed_on_cuda() -> Iterator[None]:
    """Make DeepSpeed, which must have been imported, treat the device of this process as CUDA,
    whatever it detected on import."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    before = real_accelerator.get_accelerator()
    real_accelerator.set_accelerator(CUDA_Accelerator())
    try:
        yield
    finally:
        real_accelerator.set_accelerator(before)
