"""The rate at which a device multiplies large matrices."""

from __future__ import annotations

import time

import torch

SIDES = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices: larger ones are not faster."""
ROUNDS = 5
LONGEST = 2.0
"""Seconds after which no further round begins."""


def measured_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations per second of a product of square matrices, the best of a few, with
    the threads that this process computes with."""
    side = SIDES.get(device.type, SIDES["cpu"])
    first = torch.full((side, side), 1e-2, dtype=dtype, device=device)
    _seconds(first)  # the first one also prepares libraries and memory
    began, best = time.perf_counter(), _seconds(first)
    for _ in range(ROUNDS - 1):
        if time.perf_counter() - began > LONGEST:
            break
        best = min(best, _seconds(first))
    return 2 * side**3 / best


def _seconds(matrix: torch.Tensor) -> float:
    _wait(matrix.device)
    began = time.perf_counter()
    torch.mm(matrix, matrix)
    _wait(matrix.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
