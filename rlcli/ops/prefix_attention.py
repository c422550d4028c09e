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
from rlcli.ops.shared_prefixes import SharedPrefixes

if TYPE_CHECKING:
    from rlcli.ops.flash_attention import FlashAttention


@dataclass(frozen=True)
class PrefixAttention:
    """The layout of a pack in which some sequences begin with tokens that others have."""

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
    def is_padding(self) -> torch.Tensor:
        """[U] bool: no row is."""
        return torch.zeros(len(self._computed), dtype=torch.bool, device=self.device)

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, ...] from rows [U, ...]; a row has the sum of the gradients of its tokens."""
        return rows.index_select(0, self._rows)

    def scored(
        self, hidden: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [U + B, H] of hidden states [U, H], and the token that each is to predict, of
        `tokens` [T]: after the last token of a prefix, there is one for each branch."""
        branching = hidden.index_select(0, self.prefixes.predictors.to(self.device))
        first = tokens[self.prefixes.branches.to(self.device)]
        return torch.cat([hidden, branching]), torch.cat([self.mine(tokens.roll(-1)), first])

    def of_actions(self, scores: torch.Tensor) -> torch.Tensor:
        """[T - N], of every action, from those [U + B] of what is `scored`."""
        return scores.index_select(0, self.prefixes.scores.to(self.device))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """[1, U, H, D] for the queries [1, H, U, D] of the computed tokens."""
        return self._continued.attend(query, self._copied(key), self._copied(value), scoring)

    def _copied(self, states: torch.Tensor) -> torch.Tensor:
        """[1, H, K, D] from [1, H, U, D]: those of whole sequences."""
        rows: torch.Tensor = _Copied.apply(states[0].transpose(0, 1), self._copies)
        return rows.transpose(0, 1)[None]

    @cached_property
    def _continued(self) -> PackedAttention:
        """Of the sequences with tokens of their own."""
        pairs = zip(self.lengths, self.prefixes.shared, strict=True)
        lengths, contexts = zip(*((n, s) for n, s in pairs if s < n), strict=True)
        return PackedAttention(lengths, self.device, self.flash, contexts)

    @cached_property
    def _copies(self) -> torch.Tensor:
        """The rows of all tokens of these sequences, one after another."""
        parts = self.prefixes.rows.split(list(self.lengths))
        pairs = zip(parts, self.prefixes.shared, strict=True)
        return torch.cat([rows for rows, shared in pairs if shared < len(rows)]).to(self.device)

    @cached_property
    def _computed(self) -> torch.Tensor:
        return self.prefixes.computed.to(self.device)

    @cached_property
    def _rows(self) -> torch.Tensor:
        return self.prefixes.rows.to(self.device)


class _Copied(torch.autograd.Function):
    """Rows of x [n, H, D] by index, some of them several times; their gradients are added up in
    float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.index, ctx.rows = index, len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.rows, *grad.shape[1:], dtype=dtype)
        return total.index_add_(0, ctx.index, grad.to(dtype)).to(grad.dtype), None
