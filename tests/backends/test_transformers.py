"""What the backends make of transformers models: the dtype of their products."""

import os
import subprocess
import sys

import pytest

OLDER = [
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
]


@pytest.mark.parametrize("limits", OLDER, ids=lambda limits: " ".join(limits.values()))
def test_auto_is_float32_where_the_processor_does_not_multiply_bfloat16(limits):
    """On processors without AVX-512 and AMX, and on others that are kept from using them."""
    script = """
import torch
from rlcli.backends._transformers import compute_dtype
print(compute_dtype("auto", torch.device("cpu")))
"""
    environment = {**os.environ, **limits, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "torch.float32\n"
