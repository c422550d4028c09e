"""Causal attention over packed sequences, and over the slots of a KV cache,
with windows and capped scores.

Shapes follow transformers: queries [B, H, T, D], keys and values [B, H_kv, T, D], result [B, T,
H, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

from rlcli.ops.packing import cumulative, rectangles

if TYPE_CHECKING:
    from rlcli.ops.flash_attention import FlashAttention

Kernels = Literal["auto", "torch", "flash"]


@dataclass(frozen=True)
class Scoring:
    """How a layer scores the tokens before each token, and which of them it attends to."""

    scale: float | None = None
    """Factor of the products of queries and keys; None for 1 / √D."""
    window: int | None = None
    """Number of latest tokens that each token attends to, including itself; None for all."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap): Gemma 2,
    https://arxiv.org/abs/2408.00118, section 2."""

    def window_within(self, length: int) -> int | None:
        """The window if it is shorter than a sequence of `length` tokens, else None:
        it would hide nothing."""
        return self.window if self.window is not None and self.window < length else None


@dataclass(frozen=True)
class PackedAttention:
    """Every sequence attends to itself, causally, and to no other."""

    lengths: tuple[int, ...]
    device: torch.device
    flash: FlashAttention | None = None
    """Attends on CUDA in 16 bits; None: torch's kernel does, where it can."""

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def mine(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that this rank computes with, of [T, ...]: all. Where ranks share the tokens of
        a pack, `rlcli.ops.context_attention` takes the place of this class."""
        return rows

    @property
    def is_padding(self) -> torch.Tensor:
        """[T] bool, for each row that this rank computes with: none is."""
        return torch.zeros(sum(self.lengths), dtype=torch.bool, device=self.device)

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, ...] from the rows that each rank has computed."""
        return rows

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """B is 1: the sequences are concatenated along T."""
        narrow = narrow_dtype(query)
        has_kernel = self.flash is not None or scoring.softcap is None  # torch's caps no scores
        if query.is_cuda and narrow is not None and has_kernel:
            return self._varlen(query.to(narrow), key.to(narrow), value.to(narrow), scoring)
        return self._rectangles(query, key, value, scoring)

    def _varlen(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        packed = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]  # [T, H, D]
        if self.flash is not None:
            q, k, v = packed
            return self.flash.attend(q, k, v, self._starts, self.longest, scoring)[None]
        from torch.nn.attention import varlen

        attend: Any = varlen.varlen_attn
        bounds = (self._starts, self._starts, self.longest, self.longest)
        window = scoring.window_within(self.longest)
        before = -1 if window is None else window - 1
        out: torch.Tensor = attend(
            *packed,
            *bounds,
            scale=scoring.scale,
            window_size=(before, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[None]

    @cached_property
    def _starts(self) -> torch.Tensor:
        return cumulative(self.lengths, self.device)

    def _rectangles(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Sequences of similar length are padded on the right to a rectangle.

        Padding needs no mask: causality keeps real queries from seeing what follows them.
        """
        layout = self._layout
        q, k, v = (
            GatheredRows.apply(x[0].transpose(0, 1), layout.cells, layout.places, None)
            for x in (query, key, value)
        )
        rows, begin = [], 0
        for sequences, longest in layout.shapes:
            end = begin + sequences * longest
            a, b, c = (
                x[begin:end].unflatten(0, (sequences, longest)).transpose(1, 2) for x in (q, k, v)
            )
            window = scoring.window_within(longest)
            mask = _band(longest, window, self.device) if window is not None else None
            # [sequences · longest, H, D]
            rows.append(_attend(a, b, c, mask, scoring).transpose(1, 2).flatten(0, 1))
            begin = end
        return GatheredRows.apply(torch.cat(rows), layout.places, layout.cells, layout.filled)[None]

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
            shapes,
            torch.cat(cells).to(self.device),
            torch.cat(filled).to(self.device),
            places.to(self.device),
        )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """[B, H, T, D]. `mask` is True for the keys that a query sees; None:
    itself and those before it."""
    if scoring.softcap is not None:
        return _attend_capped(query, key, value, mask, scoring.softcap, scoring.scale)
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scoring.scale,
        enable_gqa=grouped,
    )


def _attend_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float,
    scale: float | None,
) -> torch.Tensor:
    """The same with all scores in memory at once: torch has no kernel that caps them."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    seen = _band(query.shape[2], None, query.device) if mask is None else mask
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[length, length] bool: whether the key is one of the `window` tokens that end with the
    query."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal if window is None else causal.triu(1 - window)


def narrow_dtype(query: torch.Tensor) -> torch.dtype | None:
    """The 16-bit dtype that attention computes in, if it does.

    Under autocast, torch's own attention casts its inputs, which rotary embeddings have made
    float32 again; for kernels unknown to autocast, they must be cast beforehand.
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
    """[M] bool: whether the cell is not padding."""
    places: torch.Tensor
    """[T]: the cell of each token."""


class GatheredRows(torch.autograd.Function):
    """Rows of x [n, H, D] by index. Every row that matters is taken once,
    so the gradient is also a gather.

    (The gradient of `index_select` itself adds up rows one by one,
    which takes several times as long on a CPU.)
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        index: torch.Tensor,
        inverse: torch.Tensor,
        counted: torch.Tensor | None,
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
    """[B] int64: tokens in each row, including the new one."""
    longest: int

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        window = scoring.window_within(self.longest)
        mask = self._filled if window is None else self._filled & self._recent(window)
        return _attend(query, key, value, mask, scoring).transpose(1, 2)

    @cached_property
    def _filled(self) -> torch.Tensor:
        """[B, 1, 1, longest] bool."""
        return (self._columns < self.filled[:, None])[:, None, None]

    def _recent(self, window: int) -> torch.Tensor:
        """[B, 1, 1, longest] bool: one of the last `window` tokens of the row,
        or a slot after them."""
        return (self._columns >= self.filled[:, None] - window)[:, None, None]

    @cached_property
    def _columns(self) -> torch.Tensor:
        return torch.arange(self.longest, device=self.filled.device)


def packed_attention(
    lengths: Sequence[int], device: torch.device, flash: FlashAttention | None = None
) -> PackedAttention:
    return PackedAttention(tuple(lengths), device, flash)
