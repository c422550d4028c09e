"""Causal attention over packed sequences, and over the slots of a KV cache,
with windows and capped scores.

Shapes follow transformers: queries [B, H, T, D], keys and values [B, H_kv, T, D], result [B, T,
H, D].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from rlcli.ops.packing import Bounds, all_but_last, marked
from rlcli.ops.rectangles import Cells, Rectangle, rectangles_of

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
    """Computes attention on CUDA in 16 bits; None: torch's kernel does, where it can."""
    contexts: tuple[int, ...] | None = None
    """[N] how many of a sequence's first tokens have keys and values, but no queries; None: none
    of any sequence."""

    def mine(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that this rank computes with, of [T, ...]: all. Where ranks share the tokens of
        a pack, `rlcli.ops.context_attention` takes the place of this class."""
        return rows

    @property
    def pairs(self) -> int:
        """Queries and keys of the same sequence, hidden ones included."""
        contexts = self.contexts or [0] * len(self.lengths)
        return sum(n * (n - c) for n, c in zip(self.lengths, contexts, strict=True))

    @property
    def is_padding(self) -> torch.Tensor:
        """[T] bool: whether each row that this rank computes with is padding; none is."""
        return torch.zeros(sum(self.lengths), dtype=torch.bool, device=self.device)

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, ...] from the rows that each rank has computed."""
        return rows

    def scored(
        self, hidden: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states that predict tokens, and the token that each is to predict, of `tokens`
        [T]: for every position the next one, also for those without a successor in their sequence.

        (Dropping these first would cost a scatter of [T, H] in the backward pass.)
        """
        return hidden, tokens.roll(-1)

    def of_actions(self, scores: torch.Tensor) -> torch.Tensor:
        """[T - N]: the score of every action, from the scores of the rows that `scored` returns."""
        return scores[self._actions]

    def read_by(self, actions: torch.Tensor) -> torch.Tensor:
        """[T] bool: which of the rows that `scored` returns give the scores of `actions`, [T - N]
        bool."""
        return marked(self._actions, actions, sum(self.lengths))

    @cached_property
    def _actions(self) -> torch.Tensor:
        return all_but_last(self.lengths, self.device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """B is 1: the sequences are concatenated along T. With contexts, queries and the result
        have only the tokens after them."""
        narrow = narrow_dtype(query)
        has_kernel = self.flash is not None or scoring.softcap is None  # torch's caps no scores
        if query.is_cuda and narrow is not None and has_kernel:
            wide = as_wide_as(query, value).to(narrow)
            out = self._varlen(query.to(narrow), key.to(narrow), wide, scoring)
            return out[..., : value.shape[-1]]
        return self._rectangles(query, key, value, scoring)

    def _varlen(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        packed = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]  # [T, H, D]
        if self.flash is not None:
            q, k, v = packed
            return self.flash.attend(q, k, v, self._queries, self._keys, scoring)[None]
        from torch.nn.attention import varlen

        attend: Any = varlen.varlen_attn
        queries, keys = self._queries, self._keys
        bounds = (queries.starts, keys.starts, queries.longest, keys.longest)
        window = scoring.window_within(keys.longest)
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
    def _queries(self) -> Bounds:
        return self._keys if self.contexts is None else Bounds.of(self._counts, self.device)

    @cached_property
    def _keys(self) -> Bounds:
        return Bounds.of(self.lengths, self.device)

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        """The number of queries of each sequence."""
        contexts = self.contexts or (0,) * len(self.lengths)
        return tuple(length - start for length, start in zip(self.lengths, contexts, strict=True))

    def _rectangles(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Sequences of similar length are padded on the right to a rectangle, and on the left if
        their contexts differ.

        Padding on the right needs no mask: causality keeps real queries from seeing what follows
        them.
        """
        queries, keys = self._cells
        with _kernel_dtype(query) as dtype:
            in_rectangles = zip(
                queries.split(queries.filled_with(query.to(dtype))),
                keys.split(keys.filled_with(key.to(dtype))),
                keys.split(keys.filled_with(value.to(dtype))),
                strict=True,
            )
            attended = []
            for number, (q, k, v) in enumerate(in_rectangles):
                mask = self._mask(number, scoring.window_within(k.shape[2]), dtype)
                out = _attend(q, k, v, mask, scoring)
                attended.append(out.transpose(1, 2).flatten(0, 1))  # [sequences · longest, H, D]
            return queries.taken_from(torch.cat(attended))[None].to(query.dtype)

    def _mask(self, number: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """What is added to the scores of a rectangle's queries: [n, keys], or [N, 1, n, keys] where
        contexts differ; None: queries see themselves and what is before them."""
        if (number, window) not in self._masks:
            seen = self._similar[number].seen(window, self.device)
            self._masks[number, window] = None if seen is None else _added(seen, dtype)
        return self._masks[number, window]

    @cached_property
    def _masks(self) -> dict[tuple[int, int | None], torch.Tensor | None]:
        return {}

    @cached_property
    def _similar(self) -> list[Rectangle]:
        return rectangles_of(self._counts, self.contexts or (0,) * len(self.lengths))

    @cached_property
    def _cells(self) -> tuple[Cells, Cells]:
        """The cells of queries and those of keys."""
        groups = self._similar
        of_queries = [(group.numbers, group.positions_of_queries()) for group in groups]
        queries = Cells.of(self._counts, of_queries, self.device)
        if self.contexts is None:
            return queries, queries
        of_keys = [(group.numbers, group.positions_of_keys()) for group in groups]
        return queries, Cells.of(self.lengths, of_keys, self.device)


@contextmanager
def _kernel_dtype(query: torch.Tensor) -> Iterator[torch.dtype]:
    """The dtype of what the kernels for rectangles get, which autocast may cast.

    A CPU without tiles (AMX) converts bfloat16 block by block: with sequences of a few hundred
    tokens the backward pass in float32 takes half the time, or a fifth without AVX-512.
    """
    if query.is_cuda or torch.cpu._is_amx_tile_supported():
        yield query.dtype
        return
    with torch.autocast("cpu", enabled=False):
        yield torch.promote_types(query.dtype, torch.float32)


def _added(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores so that queries see the keys that are True: computed once for all
    layers, each of which would keep its own for the backward pass otherwise."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """[B, H, T, D]. `mask` is added to scores; None: a query sees itself and those before it."""
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
    """Attention with all scores in memory at once: torch has no kernel that caps them."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = _added(torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), scores.dtype)
    weights = (scores + mask).softmax(-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


def as_wide_as(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Values with columns of zeros, for what takes one width only. Those of multi-head latent
    attention (https://arxiv.org/abs/2405.04434, section 2.1) are narrower than its keys."""
    missing = query.shape[-1] - value.shape[-1]
    return pad(value, (0, missing)) if missing > 0 else value


def narrow_dtype(query: torch.Tensor) -> torch.dtype | None:
    """The 16-bit dtype that attention computes in, if it does.

    Under autocast, torch's own attention casts its inputs, which rotary embeddings have made
    float32 again; for kernels unknown to autocast, they must be cast beforehand.
    """
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


@dataclass(frozen=True)
class CachedAttention:
    """One new token per row attends to that row's filled slots of a KV cache."""

    filled: torch.Tensor
    """[B] int64: tokens in each row, including the new one."""
    longest: int

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        mask = self._mask(scoring.window_within(self.longest), key.dtype)
        # query heads that share a key head attend to it together, as if they were its tokens
        grouped = query[:, :, 0].unflatten(1, (key.shape[1], -1))
        return _attend(grouped, key, value, mask, scoring).flatten(1, 2)[:, None]

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, 1, longest], added to scores."""
        if window not in self._masks:
            seen = self._filled if window is None else self._filled & self._recent(window)
            self._masks[window] = _added(seen, dtype)
        return self._masks[window]

    @cached_property
    def _masks(self) -> dict[int | None, torch.Tensor]:
        """By window: all layers share them."""
        return {}

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
