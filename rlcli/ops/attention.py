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
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return self._varlen(query, key, value, scale)
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
        heads, width = query.shape[1], query.shape[3]
        rows = []
        for index, sequences, longest in self._groups:
            q, k, v = (
                x[0].index_select(1, index).view(x.shape[1], sequences, longest, width).transpose(0, 1)
                for x in (query, key, value)
            )
            out = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=heads != key.shape[1]
            )  # [n, H, longest, D]
            rows.append(out.transpose(1, 2).reshape(sequences * longest, heads, width))
        return torch.cat(rows).index_select(0, self._places)[None]

    @cached_property
    def _groups(self) -> list[tuple[torch.Tensor, int, int]]:
        """Per rectangle: [n · longest] indices of its tokens in the pack, n, longest."""
        starts = cumulative(self.lengths)
        last = sum(self.lengths) - 1
        groups = []
        for members, longest in rectangles(self.lengths):
            grid = starts[members].long()[:, None] + torch.arange(longest)[None]
            groups.append((grid.clamp(max=last).view(-1).to(self.device), len(members), longest))
        return groups

    @cached_property
    def _places(self) -> torch.Tensor:
        """[T]: where each token of the pack stands in the concatenated rectangles."""
        starts = cumulative(self.lengths)
        places = torch.empty(sum(self.lengths), dtype=torch.int64)
        offset = 0
        for members, longest in rectangles(self.lengths):
            for row, sequence in enumerate(members):
                begin, length = int(starts[sequence]), self.lengths[sequence]
                places[begin : begin + length] = offset + row * longest + torch.arange(length)
            offset += len(members) * longest
        return places.to(self.device)


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
