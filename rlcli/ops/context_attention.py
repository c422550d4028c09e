"""Attention over packed sequences whose tokens are spread over context-parallel ranks.

`ulysses` (https://arxiv.org/abs/2309.14509): all-to-alls give every rank all tokens of some heads.
`ring` (https://arxiv.org/abs/2310.01889): keys and values are sent from rank to rank, and each rank
attends to one part of them after another. Both compute the same for any lengths, windows, capped
scores and heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlcli.ops.attention import PackedAttention, Scoring, as_wide_as, narrow_dtype
from rlcli.ops.block_attention import Block, BlockAttention, BlockGradients
from rlcli.ops.context_choice import AttentionSizes, Choice
from rlcli.ops.packing import all_but_last, marked, positions
from rlcli.ops.rectangles import GatheredRows
from rlcli.ops.token_cut import TokenCut

if TYPE_CHECKING:
    from rlcli.ops.flash_attention import FlashAttention


@dataclass(frozen=True)
class ContextAttention:
    """This rank's share of a pack. Every rank of the group makes one of the same lengths, and calls
    the same methods in the same order."""

    lengths: tuple[int, ...]
    device: torch.device
    group: dist.ProcessGroup
    choice: Choice = "auto"
    flash: FlashAttention | None = None
    """Computes the attention of ulysses, over whole sequences; the blocks of a ring use torch's
    kernel."""

    def mine(self, rows: torch.Tensor) -> torch.Tensor:
        """[S, ...]: this rank's rows of a tensor with one row per token of the pack."""
        return rows[self._tokens[self.group.rank()]]

    @property
    def pairs(self) -> float:
        """This rank's share of the queries and keys of the same sequence, hidden ones included."""
        return sum(n * n for n in self.lengths) / self.group.size()

    @property
    def is_padding(self) -> torch.Tensor:
        """[S] bool: whether each slot of this rank is padding."""
        return ~self.cut.filled[self.group.rank()].to(self.device)

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, ...] in the order of the pack, from the rows [S, ...] of each rank. The loss must be
        the same function of it on every rank: each keeps the gradient of its own rows."""
        return _Gathered.apply(rows, self)

    def scored(
        self, hidden: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states [S, H] of this rank, and of `tokens` [T] the one after each."""
        return hidden, self.mine(tokens.roll(-1))

    def of_actions(self, scores: torch.Tensor) -> torch.Tensor:
        """[T - N]: the score of every action, from the scores [S] of each rank."""
        return self.gathered(scores)[self._actions]

    def read_by(self, actions: torch.Tensor) -> torch.Tensor:
        """[S] bool: the slots of this rank that give the scores of `actions`, [T - N] bool; slots
        of padding may be among them."""
        return self.mine(marked(self._actions, actions, sum(self.lengths)))

    @cached_property
    def _actions(self) -> torch.Tensor:
        return all_but_last(self.lengths, self.device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """[1, S, H, D] for the queries [1, H, S, D] of this rank's slots."""
        if (narrow := narrow_dtype(query)) is not None:  # before they are sent
            query, key, value = (x.to(narrow) for x in (query, key, value))
        has_window = scoring.window_within(max(self.lengths)) is not None
        sizes = AttentionSizes(
            query.shape[1], key.shape[1], self.group.size(), query.shape[2], has_window
        )
        if (sizes.method if self.choice == "auto" else self.choice) == "ulysses":
            return self._ulysses(query, key, value, scoring)
        states = query, key, as_wide_as(query, value)
        by_slot = (x[0].transpose(0, 1).contiguous() for x in states)
        return _Ring.apply(*by_slot, self, scoring)[None, ..., : value.shape[-1]]

    # -- Ulysses -----------------------------------------------------------------------------------

    def _ulysses(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Keys are repeated where there are fewer heads of them than ranks."""
        repeats = lcm(key.shape[1], self.group.size()) // key.shape[1]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        q, k, v = (self._some_heads(x[0]) for x in (query, key, value))
        return self._all_heads(self._packed.attend(q, k, v, scoring)[0])[None]

    def _some_heads(self, states: torch.Tensor) -> torch.Tensor:
        """This rank's slots of all heads [H, S, D] → all tokens of its heads [1, H / n, T, D]."""
        by_rank = states.unflatten(0, (self.group.size(), -1)).transpose(1, 2)
        cells = _AllToAll.apply(by_rank, self.group).flatten(0, 1)
        filled = self.cut.filled.flatten().to(self.device)
        rows = GatheredRows.apply(cells, self._slots, self._tokens.flatten(), filled)
        return rows.transpose(0, 1)[None]

    def _all_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse, after attention: [T, H / n, D] → [S, H, D]."""
        cells = GatheredRows.apply(rows, self._tokens.flatten(), self._slots, None)
        by_heads = _AllToAll.apply(cells.unflatten(0, self._tokens.shape), self.group)
        return by_heads.transpose(0, 1).flatten(1, 2)

    @cached_property
    def _packed(self) -> PackedAttention:
        return PackedAttention(self.lengths, self.device, self.flash)

    # -- ring --------------------------------------------------------------------------------------

    @cached_property
    def blocks(self) -> list[Block]:
        """What this rank sees of each rank."""
        rank = self.group.rank()
        places = positions(self.lengths)[self.cut.tokens].to(self.device)
        return [
            Block(tuple(self.cut.pairs(rank, source)), places[rank], places[source], source == rank)
            for source in range(self.group.size())
        ]

    def uses_kernel(self, query: torch.Tensor, scoring: Scoring) -> bool:
        """Whether torch's kernel for packed sequences attends to a block."""
        is_plain = scoring.softcap is None and scoring.window_within(max(self.lengths)) is None
        return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and is_plain

    # -- the cut -----------------------------------------------------------------------------------

    @cached_property
    def cut(self) -> TokenCut:
        return TokenCut(self.lengths, self.group.size())

    @cached_property
    def _tokens(self) -> torch.Tensor:
        """[ranks, S]: the token in each slot; token 0 in padding."""
        return self.cut.tokens.to(self.device)

    @cached_property
    def _slots(self) -> torch.Tensor:
        """[T]: the slot of each token, counted over all ranks."""
        return self.cut.slots.to(self.device)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, share: ContextAttention) -> torch.Tensor:
        ctx.share = share
        parts = [torch.empty_like(rows) for _ in range(share.group.size())]
        dist.all_gather(parts, rows.contiguous(), group=share.group)
        return torch.cat(parts)[share._slots]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows = ctx.share.mine(grad)
        return rows.masked_fill(ctx.share.is_padding.view(-1, *[1] * (rows.dim() - 1)), 0.0), None


class _AllToAll(torch.autograd.Function):
    """Part i [i, ...] of each rank goes to rank i, where parts are in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group)
    return received


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        share: ContextAttention,
        scoring: Scoring,
    ) -> torch.Tensor:
        attention = BlockAttention(query, scoring, share.uses_kernel(query, scoring))
        for source, (k, v) in _rounds([key, value], share.group):
            attention.attend(k, v, share.blocks[source])
        out = attention.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, attention.normalizers)
        ctx.settings = share, scoring
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, normalizers = ctx.saved_tensors
        share, scoring = ctx.settings
        gradients = BlockGradients(
            grad, query, out, normalizers, scoring, share.uses_kernel(query, scoring)
        )
        passing: _Passing | None = None
        for source, (k, v) in _rounds([key, value], share.group):
            shares: Sequence[torch.Tensor] = gradients.through(k, v, share.blocks[source])
            if passing is not None:  # what other ranks have added for these keys
                shares = [
                    mine + sum_ for mine, sum_ in zip(shares, passing.received(), strict=True)
                ]
            passing = _Passing(shares, share.group, _GRADIENTS)
        assert passing is not None
        of_key, of_value = passing.received()  # back on the rank that the keys are from
        return (
            gradients.of_query.to(query.dtype),
            of_key.to(key.dtype),
            of_value.to(value.dtype),
            None,
            None,
        )


def _rounds(
    mine: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
    """(rank that they are from, tensors) for the tensors of each rank, this one's first. The next
    ones are on their way while the caller uses these."""
    arrived, rank, ranks = mine, group.rank(), group.size()
    for number in range(ranks):
        passing = _Passing(arrived, group, _KEYS) if number + 1 < ranks else None
        yield (rank - number) % ranks, arrived
        if passing is not None:
            arrived = passing.received()


_KEYS, _GRADIENTS = 0, 1
"""Tags of messages that may be in progress at the same time."""


class _Passing:
    """Tensors on their way to the next rank, as one message, while those of the rank before
    arrive."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, tag: int):
        self._shapes = [tensor.shape for tensor in tensors]
        self._sent = torch.cat([tensor.flatten() for tensor in tensors])
        self._received = torch.empty_like(self._sent)
        rank, ranks = group.rank(), group.size()
        ends = ((dist.isend, self._sent, rank + 1), (dist.irecv, self._received, rank - 1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(operation, message, group=group, group_peer=peer % ranks, tag=tag)
                for operation, message, peer in ends
            ]
        )

    def received(self) -> list[torch.Tensor]:
        for work in self._works:
            work.wait()
        messages = self._received.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(messages, self._shapes, strict=True)]
