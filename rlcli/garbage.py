"""Memory that a process no longer needs.

Python collects garbage rarely while a process starts, as usual while it works, and not at all as it
ends. The C library returns freed memory to the kernel, unless asked to keep it.
"""

from __future__ import annotations

import ctypes
import gc

USUAL = gc.get_threshold()
RARELY = 20_000
"""Objects created between collections while a process starts. Importing torch creates hundreds of
thousands that stay: with the usual 700, a sixth of the time goes into looking at them."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
LARGEST_KEPT = 32 << 20
"""Bytes of the largest block that is kept; glibc accepts no more on 64-bit machines."""
FREE_AT_THE_TOP = 1 << 30
"""Bytes that may stay free at the end of the heap."""


def collect_rarely() -> None:
    """Most objects created now are there to stay."""
    gc.set_threshold(RARELY, *USUAL[1:])
    gc.enable()


def collect_as_usual() -> None:
    """A process that called `collect_rarely` has started: existing objects stay,
    and are not looked at again."""
    if gc.get_threshold()[0] == RARELY:
        gc.freeze()
        gc.set_threshold(*USUAL)


def leave_garbage() -> None:
    """The process ends: skip a last collection, which takes longer than many an import."""
    gc.freeze()


def keep_freed_memory() -> bool:
    """Have this process reuse blocks of up to 32 MiB instead of returning them to the kernel;
    False if it cannot.

    Every training step allocates and frees the same activations. By default glibc returns the
    larger ones, and the kernel then zeroes and maps each page again in the next step: 13,000 page
    faults per step of `sft_math`, a tenth of its time on a CPU.
    Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(M_TRIM_THRESHOLD, FREE_AT_THE_TOP)
    )
