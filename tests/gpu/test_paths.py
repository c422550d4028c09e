"""Every path of engines, interfaces and runs gives the same results on a GPU as on the CPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from pretend_cuda import pretend_cuda

from ..device.engine_paths import ENGINES
from ..device.interface_paths import INTERFACES
from ..device.runtime_paths import OF_RANKS, RUNTIME

pytestmark = pytest.mark.timeout(600)

PATHS = {
    f"{kind}: {name}": path
    for kind, paths in {"engine": ENGINES, "interface": INTERFACES, "runtime": RUNTIME}.items()
    for name, path in paths.items()
    if path not in OF_RANKS  # these fork, which CUDA does not allow: see test_ranks.py
}
ROUGH = ("16 bits", "dtype of the device")
"""CUDA's autocast keeps other operations in float32 than the CPU's."""


def numbers(result):
    """Tensors on the CPU, numbers, lists and dicts; text as numbers."""
    if isinstance(result, dict):
        return {str(key): numbers(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [numbers(entry) for entry in result]
    if isinstance(result, torch.Tensor):
        return result.cpu()
    return [ord(letter) for letter in result] if isinstance(result, str) else result


@pytest.mark.parametrize("name", PATHS)
def test_a_path_gives_the_same_results_as_on_the_cpu(name, device_name, tmp_path):
    path = PATHS[name]
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cuda").mkdir()
    on_cpu = path(torch.device("cpu"), tmp_path / "cpu")
    with nullcontext() if device_name == "cuda" else pretend_cuda():
        on_cuda = path(torch.device("cuda", 0), tmp_path / "cuda")
    within = 5e-2 if any(word in name for word in ROUGH) else 1e-3
    torch.testing.assert_close(numbers(on_cuda), numbers(on_cpu), rtol=within, atol=within)
