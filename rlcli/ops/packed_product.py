"""Products with weights that oneDNN has brought into its own order, which a CPU multiplies with few
rows faster than weights as they are stored."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

ROWS = 32
"""Rows for which the order is chosen: always the same ones, so that a product does not depend on
how many responses a call has."""


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
    if not weight.is_mkldnn:
        return linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
