"""Memory that a step frees is there for the next one."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from rlcli.garbage import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory(of_activations=True)

def faults_of(rows, blocks):
    def step():
        # freed at the end
        activations = [torch.ones(n, 512) for n in range(rows, 2 * rows, rows // blocks)]

    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5

print(faults_of(1_000, 20), faults_of(20_000, 4))  # blocks of 2 to 4 MB, and of 41 to 72 MB
"""
PAGES = 15_000, 54_000
"""That such steps take if they get new ones, of 4 KiB; a kernel may use larger ones."""
LARGE_BLOCKS_ARE_KEPT_SINCE = (2, 35)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="asks for glibc")
def test_a_step_takes_no_new_pages():
    # How much glibc returns by itself depends on the layout of the heap; so told,
    # it returns every large block.
    returning = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

    def faults(how):
        command = [sys.executable, "-c", FAULTS, how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=returning)
        assert done.returncode == 0, done.stderr
        return [int(count) for count in done.stdout.split()]

    for pages, count in zip(PAGES, faults("returned"), strict=True):
        assert count > pages // 3
    small, large = faults("kept")
    assert small < 1_000
    _, glibc = platform.libc_ver()
    if tuple(map(int, glibc.split("."))) >= LARGE_BLOCKS_ARE_KEPT_SINCE:
        assert large < 1_000
