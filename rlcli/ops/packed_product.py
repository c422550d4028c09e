"""Products of a few rows on a CPU: with weights that oneDNN has brought into its own order, or, for
a single row, block by block."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

ROWS = 32
"""Rows for which the order is chosen: always the same ones, so that a product does not depend on
how many responses a call has."""
BLOCKS = 16
"""Of a matrix that a single row is multiplied with: as many for any number of threads."""
FEWEST_NUMBERS = 1 << 16
"""Of a matrix that is worth several threads."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products in `dtype` can have packed weights here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def packed(weight: torch.Tensor) -> torch.Tensor:
    """An opaque tensor [m, n] for `product`, with a copy of `weight` [m, n]."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., m]: x [..., n] · weightᵀ + bias, all of one dtype; `weight` [m, n] may be packed."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if _takes_blocks(x, weight):
        return _product_of_blocks(x, weight, bias)
    return linear(x, weight, bias)


def _takes_blocks(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether one thread would compute a product while others wait: MKL multiplies a single row in
    float32 with one."""
    return (
        x.numel() == weight.shape[1]
        and torch.get_num_threads() > 1
        and x.device.type == "cpu"
        and x.dtype is weight.dtype is torch.float32
        and weight.shape[0] % BLOCKS == 0
        and weight.numel() >= FEWEST_NUMBERS
    )


def _product_of_blocks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`product` of a single row, as a batch of blocks over which threads are spread."""
    blocks = weight.unflatten(0, (BLOCKS, -1))
    row = x.reshape(1, 1, -1).expand(BLOCKS, 1, -1)
    result = torch.bmm(row, blocks.mT).view(*x.shape[:-1], len(weight))
    return result if bias is None else result + bias
