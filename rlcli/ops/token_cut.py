"""How the ranks of a context-parallel group share the tokens of packed sequences.

Under causality a late token attends to more tokens than an early one. So each sequence of L tokens
is cut into 2n parts for n ranks, and rank r takes parts r and 2n - 1 - r: an early one and a late
one (Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2). Sequences need not be divisible:
tokens that are left over go to the ranks that have the fewest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import torch

SlotPair = tuple[range, range]
"""Slots of the queries and of the keys of one sequence."""


@dataclass(frozen=True)
class TokenCut:
    """Every rank has `size` slots for its tokens: sequence after sequence, the early part before
    the late one. The last slot of some ranks is padding, because all messages have one size."""

    lengths: tuple[int, ...]
    """Tokens of each sequence of the pack."""
    ranks: int

    @cached_property
    def parts(self) -> list[list[tuple[range, range]]]:
        """[ranks][N]: the early and the late part of a rank in each sequence, as tokens of the
        pack."""
        parts: list[list[tuple[range, range]]] = [[] for _ in range(self.ranks)]
        loads = [0] * self.ranks
        begin = 0
        for length in self.lengths:
            shares = _shares(length, loads)
            loads = [load + share for load, share in zip(loads, shares, strict=True)]
            for mine, halves in zip(parts, _zigzag(begin, shares), strict=True):
                mine.append(halves)
            begin += length
        return parts

    @cached_property
    def size(self) -> int:
        """Slots of a rank."""
        return -(-sum(self.lengths) // self.ranks)

    @cached_property
    def tokens(self) -> torch.Tensor:
        """[ranks, size] int64: the token in each slot; token 0 in padding."""
        table = torch.zeros(self.ranks, self.size, dtype=torch.int64)
        for row, tokens in zip(table, self._tokens, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        return table

    @cached_property
    def filled(self) -> torch.Tensor:
        """[ranks, size] bool: whether the slot is not padding."""
        counts = torch.tensor([len(tokens) for tokens in self._tokens])
        return torch.arange(self.size) < counts[:, None]

    @cached_property
    def slots(self) -> torch.Tensor:
        """[T] int64: the slot of each token, counted over all ranks."""
        slots = torch.empty(sum(self.lengths), dtype=torch.int64)
        slots[self.tokens[self.filled]] = self.filled.flatten().nonzero()[:, 0]
        return slots

    def pairs(self, rank: int, source: int) -> Iterator[SlotPair]:
        """For each sequence in which tokens of `rank` see tokens of `source`, the slots of these
        tokens on either rank. Between two ranks every query sees every key; within one rank it
        sees the keys up to its own slot."""
        of_rank = zip(self.parts[rank], self._starts(rank), strict=True)
        of_source = zip(self.parts[source], self._starts(source), strict=True)
        for ((early, late), start), ((first, last), origin) in zip(of_rank, of_source, strict=True):
            queries = range(start, start + len(early) + len(late))
            keys = range(origin, origin + len(first) + len(last))
            if source < rank:
                keys = keys[: len(first)]
            elif source > rank:
                queries = queries[len(early) :]
            if queries and keys:
                yield queries, keys

    @cached_property
    def _tokens(self) -> list[list[int]]:
        """The tokens of each rank, in the order of its slots."""
        return [list(chain.from_iterable(chain.from_iterable(parts))) for parts in self.parts]

    def _starts(self, rank: int) -> list[int]:
        """The first slot of each sequence."""
        counts = [len(early) + len(late) for early, late in self.parts[rank]]
        return [0, *accumulate(counts)][:-1]


def _shares(length: int, loads: Sequence[int]) -> list[int]:
    """Tokens of a sequence for each rank: equal to one, more for ranks with the smallest loads."""
    each, rest = divmod(length, len(loads))
    lightest = set(sorted(range(len(loads)), key=loads.__getitem__)[:rest])
    return [each + (rank in lightest) for rank in range(len(loads))]


def _zigzag(begin: int, shares: Sequence[int]) -> list[tuple[range, range]]:
    """The early and late tokens of each rank in a sequence that starts at token `begin`: early
    parts in the order of the ranks, then late parts in reverse."""
    early = [share // 2 for share in shares]
    late = [share - half for share, half in zip(shares, early, strict=True)]
    sizes = [*early, *reversed(late)]
    bounds = list(accumulate(sizes, initial=begin))
    ranges = [range(bound, bound + size) for bound, size in zip(bounds, sizes, strict=False)]
    return list(zip(ranges, reversed(ranges), strict=True))[: len(shares)]
