"""Attention over packed sequences whose common prefixes are computed once.

Queries are those of the U tokens that are computed. Keys and values are copied to every sequence
that they belong to, and attention is that of the last tokens of each sequence to all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from rlcli.ops.attention import PackedAttention, Scoring
from rlcli.ops.packing import marked
from rlcli.ops.shared_prefixes import SharedPrefixes

if TYPE_CHECKING:
    from rlcli.ops.flash_attention import FlashAttention


@dataclass(frozen=True)
class PrefixAttention:
    """The layout of a pack in which some sequences begin with the same tokens as others."""

    prefixes: SharedPrefixes
    device: torch.device
    flash: FlashAttention | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.prefixes.lengths

    def mine(self, rows: torch.Tensor) -> torch.Tensor:
        """[U, ...]: the rows of the computed tokens, of one row per token of the pack."""
        return rows[self._computed]

    @property
    def pairs(self) -> int:
        """Queries that are computed and keys of the same sequence, hidden ones included."""
        return self._continued.pairs

    @property
    def is_padding(self) -> torch.Tensor:
        """[U] bool: whether each row is padding; none is."""
        return torch.zeros(len(self._computed), dtype=torch.bool, device=self.device)

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, ...] from rows [U, ...]; a row has the sum of the gradients of its tokens."""
        return self._rows.of(rows)

    def scored(
        self, hidden: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [U + B, H] of hidden states [U, H], and the token that each is to predict, of
        `tokens` [T]: after the last token of a prefix, there is one for each branch."""
        branching = Copies(self.prefixes.predictors, self.device).of(hidden)
        first = tokens[self.prefixes.branches.to(self.device)]
        return torch.cat([hidden, branching]), torch.cat([self.mine(tokens.roll(-1)), first])

    def of_actions(self, scores: torch.Tensor) -> torch.Tensor:
        """[T - N]: the score of every action, from those [U + B] of the rows that `scored`
        returns."""
        return Copies(self.prefixes.scores, self.device).of(scores)

    def read_by(self, actions: torch.Tensor) -> torch.Tensor:
        """[U + B] bool: the rows that give the scores of `actions`, [T - N] bool."""
        count = len(self.prefixes.computed) + len(self.prefixes.branches)
        return marked(self.prefixes.scores.to(self.device), actions, count)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """[1, U, H, D] for the queries [1, H, U, D] of the computed tokens."""
        return self._continued.attend(query, self._copied(key), self._copied(value), scoring)

    def _copied(self, states: torch.Tensor) -> torch.Tensor:
        """[1, H, K, D], for whole sequences, from [1, H, U, D]."""
        return self._copies.of(states[0].transpose(0, 1)).transpose(0, 1)[None]

    @cached_property
    def _continued(self) -> PackedAttention:
        """The attention of the sequences that have tokens of their own."""
        pairs = zip(self.lengths, self.prefixes.shared, strict=True)
        lengths, contexts = zip(*((n, s) for n, s in pairs if s < n), strict=True)
        return PackedAttention(lengths, self.device, self.flash, contexts)

    @cached_property
    def _copies(self) -> Copies:
        """The rows of all tokens of these sequences, one after another."""
        parts = self.prefixes.rows.split(list(self.lengths))
        pairs = zip(parts, self.prefixes.shared, strict=True)
        rows = torch.cat([rows for rows, shared in pairs if shared < len(rows)])
        return Copies(rows, self.device)

    @cached_property
    def _computed(self) -> torch.Tensor:
        return self.prefixes.computed.to(self.device)

    @cached_property
    def _rows(self) -> Copies:
        return Copies(self.prefixes.rows, self.device)


class Copies:
    """Rows by their index [K], some of them several times.

    The gradients of a row's copies are added up in float32, in an order that does not change: on
    CUDA, `index_add_` would give other bits each time.
    """

    def __init__(self, index: torch.Tensor, device: torch.device):
        """`index` is on the CPU, `device` that of the rows."""
        self.index = index.to(device)
        self.groups = [(rows.to(device), places.to(device)) for rows, places in _by_count(index)]

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """[K, ...] of rows [n, ...]."""
        copied: torch.Tensor = _Copied.apply(rows, self)
        return copied


def _by_count(index: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each number of copies C that occurs, the rows [R] with so many, and their places [C, R]
    in the index."""
    order = index.argsort(stable=True)
    rows, counts = index.unique(return_counts=True)
    first = counts.cumsum(0) - counts
    groups = []
    for count in counts.unique().tolist():
        has_count = counts == count
        places = order[first[has_count] + torch.arange(count)[:, None]]
        groups.append((rows[has_count], places))
    return groups


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, copies: Copies) -> torch.Tensor:
        ctx.copies, ctx.rows = copies, len(rows)
        return rows.index_select(0, copies.index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        precise = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.rows, *grad.shape[1:])
        for rows, places in ctx.copies.groups:
            copies = grad.index_select(0, places.flatten()).unflatten(0, places.shape)
            total.index_copy_(0, rows, copies.sum(0, dtype=precise).to(grad.dtype))
        return total, None
