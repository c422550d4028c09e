"""Causal attention over packed sequences, and over the slots of a KV cache.

Shapes follow transformers: queries [B, H, T, D], keys and values [B, H_kv, T, D], result [B, T, H, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from rlcli.ops.packing import cumulative, rectangles


@dataclass(frozen=True)
class PackedAttention:
    """Every sequence attends to itself, causally, and to no other."""

    lengths: tuple[int, ...]
    device: torch.device

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """B is 1: the sequences lie end to end along T."""
        narrow = _narrow_dtype(query)
        if query.is_cuda and narrow is not None:
            return self._varlen(query.to(narrow), key.to(narrow), value.to(narrow), scale)
        return self._rectangles(query, key, value, scale)

    def _varlen(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        from torch.nn.attention import varlen

        attend: Any = varlen.varlen_attn
        packed = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]  # [T, H, D]
        bounds = (self._starts, self._starts, self.longest, self.longest)
        causal = (-1, 0)
        out: torch.Tensor = attend(
            *packed, *bounds, scale=scale, window_size=causal, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out[None]

    @cached_property
    def _starts(self) -> torch.Tensor:
        return cumulative(self.lengths, self.device)

    def _rectangles(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Sequences of similar length are padded on the right to a rectangle.

        No mask is needed: causality keeps real queries from the padding behind them.
        """
        layout = self._layout
        grouped = query.shape[1] != key.shape[1]
        q, k, v = (_Rows.apply(x[0].transpose(0, 1), layout.cells, layout.places, None) for x in (query, key, value))
        rows, begin = [], 0
        for sequences, longest in layout.shapes:
            end = begin + sequences * longest
            a, b, c = (x[begin:end].unflatten(0, (sequences, longest)).transpose(1, 2) for x in (q, k, v))
            out = scaled_dot_product_attention(a, b, c, is_causal=True, scale=scale, enable_gqa=grouped)
            rows.append(out.transpose(1, 2).flatten(0, 1))  # [sequences · longest, H, D]
            begin = end
        return _Rows.apply(torch.cat(rows), layout.places, layout.cells, layout.filled)[None]

    @cached_property
    def _layout(self) -> _Layout:
        starts = cumulative(self.lengths).tolist()
        places = torch.empty(starts[-1], dtype=torch.int64)
        shapes, cells, filled, offset = [], [], [], 0
        for members, longest in rectangles(self.lengths):
            shapes.append((len(members), longest))
            grid = torch.tensor([starts[i] for i in members])[:, None] + torch.arange(longest)
            real = torch.arange(longest) < torch.tensor([self.lengths[i] for i in members])[:, None]
            places[grid[real]] = offset + real.flatten().nonzero()[:, 0]
            cells.append(grid.masked_fill(~real, 0).flatten())
            filled.append(real.flatten())
            offset += real.numel()
        return _Layout(
            shapes, torch.cat(cells).to(self.device), torch.cat(filled).to(self.device), places.to(self.device)
        )


def _narrow_dtype(query: torch.Tensor) -> torch.dtype | None:
    """The 16-bit dtype that attention computes in, if it does.

    Under autocast torch's own attention casts its inputs, which rotary embeddings have made float32 again; kernels that
    autocast does not know must be given them cast.
    """
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


@dataclass(frozen=True)
class _Layout:
    """How a pack of T tokens fills M cells, rectangle after rectangle."""

    shapes: list[tuple[int, int]]
    """Sequences and longest length of each rectangle."""
    cells: torch.Tensor
    """[M]: the token in each cell; token 0 in cells of padding."""
    filled: torch.Tensor
    """[M] bool: the cell is no padding."""
    places: torch.Tensor
    """[T]: the cell of each token."""


class _Rows(torch.autograd.Function):
    """Rows of x [n, H, D] by index. Every row that counts is taken once, so the gradient is a gather as well.

    (The gradient of `index_select` itself adds rows up one by one, which takes several times as long on a CPU.)
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, counted: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.inverse, ctx.counted = inverse, counted
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows = grad.index_select(0, ctx.inverse)
        if ctx.counted is not None:
            rows = rows.masked_fill(~ctx.counted[:, None, None], 0.0)
        return rows, None, None, None


@dataclass(frozen=True)
class CachedAttention:
    """One new token per row attends to that row's filled slots of a KV cache."""

    filled: torch.Tensor
    """[B] int64: tokens in each row, the new one included."""
    longest: int

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=self._mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2)

    @cached_property
    def _mask(self) -> torch.Tensor:
        """[B, 1, 1, longest] bool."""
        return (torch.arange(self.longest, device=self.filled.device) < self.filled[:, None])[:, None, None]


def packed_attention(lengths: Sequence[int], device: torch.device) -> PackedAttention:
    return PackedAttention(tuple(lengths), device)
