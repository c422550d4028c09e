"""Attention to one block of keys after another, merged by the log-sum-exp of each: ring attention
(https://arxiv.org/abs/2310.01889) without its messages.

Shapes are those of a rank's slots: queries [S, H, D], keys and values [S, H_kv, D], result
[S, H, D], log-sum-exp of the scores [S, H].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rlcli.ops.attention import Scoring
from rlcli.ops.packing import cumulative
from rlcli.ops.rectangles import rectangles
from rlcli.ops.token_cut import SlotPair


@dataclass(frozen=True)
class Block:
    """What the queries of one rank see of the keys of another, or of their own rank."""

    pairs: tuple[SlotPair, ...]
    """The slots of each sequence. Between two ranks every query sees every key; within one,
    `positions` decide."""
    positions: torch.Tensor
    """[S] int64: the position of each query in its sequence."""
    key_positions: torch.Tensor
    """[S] int64: likewise for the keys."""
    is_own: bool
    """Whether queries and keys are those of one rank."""

    @cached_property
    def rows(self) -> torch.Tensor:
        """Slots of the queries, sequence after sequence."""
        return self._slots([queries for queries, _ in self.pairs])

    @cached_property
    def columns(self) -> torch.Tensor:
        """Slots of the keys, sequence after sequence."""
        return self._slots([keys for _, keys in self.pairs])

    @cached_property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Where each sequence starts in `rows` and in `columns`, and the longest in each."""
        queries, keys = ([len(span) for span in spans] for spans in zip(*self.pairs, strict=True))
        device = self.positions.device
        return cumulative(queries, device), cumulative(keys, device), max(queries), max(keys)

    @cached_property
    def rectangles(self) -> list[_PaddedPairs]:
        """The pairs in groups of similar size, padded."""
        sizes = [max(len(queries), len(keys)) for queries, keys in self.pairs]
        device = self.positions.device
        groups = ([self.pairs[i] for i in members] for members, _ in rectangles(sizes))
        return [_PaddedPairs.of(pairs, device) for pairs in groups]

    def _slots(self, spans: list[range]) -> torch.Tensor:
        slots = [slot for span in spans for slot in span]
        return torch.tensor(slots, dtype=torch.int64, device=self.positions.device)


@dataclass(frozen=True)
class _PaddedPairs:
    """B pairs, padded to m queries and n keys."""

    rows: torch.Tensor
    """[B, m] slots of the queries; slot 0 in padding."""
    columns: torch.Tensor
    """[B, n] slots of the keys."""
    is_query: torch.Tensor
    """[B, m] bool: not padding."""
    is_key: torch.Tensor

    @property
    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of queries and those of keys, without padding."""
        return self.rows[self.is_query], self.columns[self.is_key]

    @classmethod
    def of(cls, pairs: list[SlotPair], device: torch.device) -> _PaddedPairs:
        rows, is_query = _padded([queries for queries, _ in pairs])
        columns, is_key = _padded([keys for _, keys in pairs])
        return cls(rows.to(device), columns.to(device), is_query.to(device), is_key.to(device))


def _padded(spans: list[range]) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of each span in a row of its own, and which of them are not padding."""
    lengths = torch.tensor([len(span) for span in spans])
    columns = torch.arange(int(lengths.max()))
    is_real = columns < lengths[:, None]
    first = torch.tensor([span.start for span in spans])
    return (first[:, None] + columns).masked_fill(~is_real, 0), is_real


class BlockAttention:
    """The result so far, over all blocks that the queries have attended to."""

    def __init__(self, query: torch.Tensor, scoring: Scoring, uses_kernel: bool = False):
        """`uses_kernel`: torch's kernel for CUDA and 16 bits, which knows neither capped scores nor
        windows of single blocks."""
        self._query = query
        self._scoring = scoring
        self._uses_kernel = uses_kernel
        precise = torch.promote_types(query.dtype, torch.float32)
        self.out = torch.zeros(query.shape, dtype=precise, device=query.device)
        self.normalizers = torch.full(
            query.shape[:2], -torch.inf, dtype=precise, device=query.device
        )
        """Log-sum-exp of the scores; -inf for a query that has seen nothing."""

    def attend(self, key: torch.Tensor, value: torch.Tensor, block: Block) -> None:
        if not block.pairs:
            return
        partial = _by_kernel if self._uses_kernel else _by_rectangles
        for rows, out, normalizers in partial(self._query, key, value, block, self._scoring):
            self._merge(rows, out, normalizers)

    def _merge(self, rows: torch.Tensor, out: torch.Tensor, normalizers: torch.Tensor) -> None:
        """Add what the queries at `rows` [m] get from another block: [m, H, D] and [m, H]."""
        before = self.normalizers[rows]
        after = torch.logaddexp(before, normalizers)
        reference = _finite(after)
        share, share_before = (normalizers - reference).exp(), (before - reference).exp()
        self.out[rows] = self.out[rows] * share_before[..., None] + out * share[..., None]
        self.normalizers[rows] = after


class BlockGradients:
    """The gradients, block by block, from those of the merged result."""

    def __init__(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        out: torch.Tensor,
        normalizers: torch.Tensor,
        scoring: Scoring,
        uses_kernel: bool = False,
    ):
        self._grad = grad
        self._query = query
        self._out = out
        self._normalizers = normalizers
        self._scoring = scoring
        self._uses_kernel = uses_kernel
        self.of_query = torch.zeros_like(normalizers[..., None].expand(query.shape))

    def through(
        self, key: torch.Tensor, value: torch.Tensor, block: Block
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This block's share of the gradients of `key` and `value`; its share of the queries'
        gradient is added to `of_query`."""
        of_key, of_value = (torch.zeros_like(x, dtype=self.of_query.dtype) for x in (key, value))
        if block.pairs:
            backward = self._by_kernel if self._uses_kernel else self._by_rectangles
            for rows, columns, *grads in backward(key, value, block):
                for total, slots, grad in zip(
                    (self.of_query, of_key, of_value), (rows, columns, columns), grads, strict=True
                ):
                    total[slots] += grad
        return of_key, of_value

    def _by_rectangles(
        self, key: torch.Tensor, value: torch.Tensor, block: Block
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        reference = _finite(self._normalizers)[..., None]
        precise = self.of_query.dtype
        of_out = (self._grad.to(precise) * self._out.to(precise)).sum(-1, keepdim=True)
        for rectangle in block.rectangles:
            group = _GroupedHeads(self._query, key, rectangle, block, self._scoring)
            weights, slope = group.weights(reference)
            g = group.heads(self._grad)
            by_weight = g @ group.keys(value).transpose(-1, -2)
            by_product = weights * (by_weight - group.heads(of_out)) * slope
            of_value = group.of_keys(weights.transpose(-1, -2) @ g)
            yield *rectangle.slots, *group.of_product(by_product), of_value

    def _by_kernel(
        self, key: torch.Tensor, value: torch.Tensor, block: Block
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        rows, columns = block.rows, block.columns
        grads = torch.ops.torch_attn._varlen_attn_backward(
            self._grad[rows].to(self._query.dtype),
            self._query[rows],
            key[columns],
            value[columns],
            self._out[rows].to(self._query.dtype),
            self._normalizers[rows].t().contiguous(),
            *block.bounds,
            block.is_own,
            torch.zeros(2, dtype=torch.uint64, device=rows.device),
            self._scoring.scale,
            _WINDOW[block.is_own],
        )
        yield rows, columns, *grads


_WINDOW = {True: [-1, 0], False: [-1, -1]}
"""Keys before and after a query that it sees, -1 for all: within a rank, between ranks."""


def _by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block, scoring: Scoring
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    from torch.nn.attention import varlen

    rows, columns = block.rows, block.columns
    attend: Any = varlen.varlen_attn
    out, normalizers = attend(
        query[rows],
        key[columns],
        value[columns],
        *block.bounds,
        return_aux=varlen.AuxRequest(lse=True),
        scale=scoring.scale,
        window_size=tuple(_WINDOW[block.is_own]),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    yield rows, out.float(), normalizers.t()


def _by_rectangles(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block, scoring: Scoring
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Attend rectangle by rectangle, with all scores of one in memory at once."""
    for rectangle in block.rectangles:
        group = _GroupedHeads(query, key, rectangle, block, scoring)
        scores, _ = group.scores()
        normalizers = scores.logsumexp(-1, keepdim=True)
        weights = (scores - _finite(normalizers)).exp()
        out = weights @ group.keys(value)
        rows, _ = rectangle.slots
        yield rows, group.of_queries(out), group.of_queries(normalizers)[..., 0]


class _GroupedHeads:
    """A rectangle of queries [B, H_kv, G · m, D] and keys [B, H_kv, n, D]: the G query heads of a
    key head are rows of one product. In float32 or wider: scores that are rounded to 16 bits would
    be wrong by more the larger they are."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        rectangle: _PaddedPairs,
        block: Block,
        scoring: Scoring,
    ):
        self._key_heads = key.shape[1]
        self._rectangle = rectangle
        self._block = block
        self._scoring = scoring
        self._precise = torch.promote_types(query.dtype, torch.float32)
        self.q, self.k = self.heads(query), self.keys(key)

    def heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [S, H, d] of queries → [B, H_kv, G · m, d]."""
        by_head = rows[self._rectangle.rows].to(self._precise).transpose(1, 2)
        return by_head.unflatten(1, (self._key_heads, -1)).flatten(2, 3)

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [S, H_kv, d] of keys → [B, H_kv, n, d]."""
        return rows[self._rectangle.columns].to(self._precise).transpose(1, 2)

    def of_queries(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `heads`, without padding: [B, H_kv, G · m, d] → [rows, H, d]."""
        queries = self._rectangle.rows.shape[1]
        by_query = x.unflatten(2, (-1, queries)).flatten(1, 2).transpose(1, 2)
        return by_query[self._rectangle.is_query]

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `keys`, without padding: [B, H_kv, n, d] → [columns, H_kv, d]."""
        return x.transpose(1, 2)[self._rectangle.is_key]

    def weights(self, normalizers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """The weights of the keys, from the log-sum-exp [S, H, 1] of all scores of a query; and the
        slope of the scores."""
        scores, slope = self.scores()
        return (scores - self.heads(normalizers)).exp(), slope

    def of_product(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of queries and keys, from that of their products."""
        return self.of_queries(grad @ self.k), self.of_keys(grad.transpose(-1, -2) @ self.q)

    def scores(self) -> tuple[torch.Tensor, torch.Tensor | float]:
        """[B, H_kv, G · m, n], -inf for hidden keys, and their slope: the derivative of a score
        with respect to the product of query and key."""
        scoring = self._scoring
        scale = self.q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
        scores = self.q @ self.k.transpose(-1, -2) * scale
        slope: torch.Tensor | float = scale
        if scoring.softcap is not None:
            capped = torch.tanh(scores / scoring.softcap)
            scores, slope = scoring.softcap * capped, scale * (1 - capped * capped)
        groups = self.q.shape[2] // self._rectangle.rows.shape[1]
        hidden = ~self._seen().repeat(1, groups, 1)[:, None]
        return scores.masked_fill(hidden, -torch.inf), slope

    def _seen(self) -> torch.Tensor:
        """[B, m, n] bool."""
        rectangle, block = self._rectangle, self._block
        before = (
            block.positions[rectangle.rows][:, :, None]
            - block.key_positions[rectangle.columns][:, None]
        )
        seen = (before >= 0) & rectangle.is_query[:, :, None] & rectangle.is_key[:, None]
        window = self._scoring.window
        return seen if window is None else seen & (before < window)


def _finite(normalizers: torch.Tensor) -> torch.Tensor:
    """The normalizers with 0 for -inf, so that differences are not NaN: exp(-inf - 0) = 0."""
    return normalizers.masked_fill(normalizers == -torch.inf, 0.0)
