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
MOST = (1 << 31) - 1
"""The largest value that `mallopt` takes."""
LARGEST_KEPT = 32 << 20
"""Bytes of the largest block that is kept where no activations are; glibc before 2.35 accepts no
more on 64-bit machines."""
FREE_AT_THE_TOP = 1 << 30
"""Bytes that may stay free at the end of the heap, likewise."""


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


def keep_freed_memory(of_activations: bool) -> bool:
    """Have this process reuse freed memory instead of returning it to the kernel; False if it
    cannot. `of_activations`: also blocks of more than 32 MiB, where a step computes on a CPU;
    elsewhere such a block is a copy of weights that is needed once.

    Every training step allocates and frees the same activations. By default glibc returns the
    larger ones, and the kernel then zeroes and maps each page again in the next step: a tenth of
    the time of an update of 135M parameters. Other C libraries are left as they are, and so are
    large blocks by glibc before 2.35, which accepts no larger limit than 32 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    if of_activations and mallopt(M_MMAP_THRESHOLD, MOST):
        return bool(mallopt(M_TRIM_THRESHOLD, MOST))
    return bool(
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(M_TRIM_THRESHOLD, FREE_AT_THE_TOP)
    )
