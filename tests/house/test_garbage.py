"""Memory that a step frees is there for the next one."""

import ctypes
import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from rlcli.garbage import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()

def step():
    # 2 to 4 MB each, freed at the end
    activations = [torch.ones(n, 512) for n in range(1000, 2000, 50)]

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="asks for glibc")
def test_a_step_takes_no_new_pages():
    # How much glibc returns by itself depends on the layout of the heap; so told,
    # it returns every large block.
    returning = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

    def faults(how):
        command = [sys.executable, "-c", FAULTS, how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=returning)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert faults("returned") > 5_000  # 60 MB in pages of 4 KiB: 15,000
    assert faults("kept") < 1_000
