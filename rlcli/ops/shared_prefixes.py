"""Which tokens of packed sequences have the same past, so that a causal model computes the same for
them: the responses to a prompt, the two sides of a pair, the branches of a trajectory.

Sequences with common beginnings form a trie. In lexicographic order, each shares most with the one
before it; so its path through the trie begins like that one's and continues with tokens of its own.
(A trie of a batch is also what https://arxiv.org/abs/2511.00413 trains on.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from itertools import count as count_from

import torch

Pays = Callable[[int, int], bool]
"""(length of a sequence, how many of its first tokens another one has) → whether to compute these
only once."""

LEAST_SAVING = 1 / 16
"""Share of the products of a sequence that must be saved: sharing copies keys and values."""


@dataclass(frozen=True)
class Work:
    """The products of a model with a token, by which it is decided whether sharing pays."""

    of_token: float
    """Operations with the matrices that a token is multiplied with."""
    of_key: float
    """Operations with the key and the value of another token."""
    skips_hidden: bool
    """Whether a kernel leaves out the keys behind a query also where a sequence's first tokens have
    no queries. Under a mask, as on a CPU, it does not."""

    def pays(self, length: int, shared: int) -> bool:
        rest = length - shared
        pairs = (length**2 - shared**2) / 2 if self.skips_hidden else rest * length
        alone = length * self.of_token + length**2 / 2 * self.of_key
        return rest * self.of_token + pairs * self.of_key <= (1 - LEAST_SAVING) * alone


@dataclass(frozen=True)
class SharedPrefixes:
    """A pack of N sequences, T tokens, of which U are computed."""

    lengths: tuple[int, ...]
    """[N] lengths of the sequences, in tokens."""
    shared: tuple[int, ...]
    """[N] how many of a sequence's first tokens are computed with another sequence."""
    computed: torch.Tensor
    """[U] int64, ascending: the token of the pack in each row that is computed."""
    rows: torch.Tensor
    """[T] int64: the row of each token."""
    branches: torch.Tensor
    """[B] int64: the first token of the pack that is computed for each sequence that shares some
    and has more. It is predicted by a row whose successor in the pack is another token."""
    predictors: torch.Tensor
    """[B] int64: the row that predicts it."""
    scores: torch.Tensor
    """[T - N] int64: where the score of each action is among those of the U rows, each with its
    successor in the pack, followed by those of the B branches."""


def shared_prefixes(
    tokens: torch.Tensor, lengths: Sequence[int], pays: Pays
) -> SharedPrefixes | None:
    """What the sequences of `lengths` [N] share, by their `tokens` [T] on the CPU; None if they
    share nothing that pays."""
    order, shared = _trie(tokens, lengths, pays)
    return _computed_once(tuple(lengths), order, tuple(shared)) if any(shared) else None


def counted_tokens(tokens: torch.Tensor, lengths: Sequence[int], pays: Pays) -> int:
    """Tokens for which there must be memory when these sequences are computed together. Of a token
    that is not computed again, a layer keeps a copy of keys and values, at most an eighth of what
    it keeps of one that is."""
    _, shared = _trie(tokens, lengths, pays)
    return sum(lengths) - sum(shared) + -(-sum(shared) // 8)


def _trie(tokens: torch.Tensor, lengths: Sequence[int], pays: Pays) -> tuple[list[int], list[int]]:
    """The sequences in lexicographic order, and [N] how many of a sequence's first tokens are
    computed with the one before it."""
    sequences = tokens.split(list(lengths))
    order = _in_order(sequences)
    shared = [0] * len(lengths)
    for before, number in pairwise(order):
        common = _common(sequences[before], sequences[number])
        if common and pays(lengths[number], common):
            shared[number] = common
    return order, shared


def _computed_once(
    lengths: tuple[int, ...], order: Sequence[int], shared: tuple[int, ...]
) -> SharedPrefixes:
    """Each sequence of `order` shares its first tokens with the one before it."""
    starts = list(accumulate(lengths, initial=0))
    is_computed = _are_new(starts, shared)
    new_rows = (is_computed.cumsum(0) - 1).split(list(lengths))
    rows = _paths(order, shared, new_rows)
    branching = _branching(lengths, shared)
    branches = [starts[i] + shared[i] for i in branching]
    predictors = [int(rows[i][shared[i] - 1]) for i in branching]
    slots = dict(zip(branching, count_from(int(is_computed.sum())), strict=False))
    return SharedPrefixes(
        lengths,
        shared,
        is_computed.nonzero()[:, 0],
        torch.cat(rows),
        torch.tensor(branches, dtype=torch.int64),
        torch.tensor(predictors, dtype=torch.int64),
        torch.cat(_score_paths(order, shared, new_rows, slots)),
    )


def _branching(lengths: Sequence[int], shared: Sequence[int]) -> list[int]:
    """The sequences that share some tokens and have more."""
    return [i for i, count in enumerate(shared) if 0 < count < lengths[i]]


def _are_new(starts: Sequence[int], shared: Sequence[int]) -> torch.Tensor:
    """[T] bool: whether a token is not among those that its sequence shares."""
    are_new = torch.ones(starts[-1], dtype=torch.bool)
    for start, count in zip(starts, shared, strict=False):
        are_new[start : start + count] = False
    return are_new


def _in_order(sequences: Sequence[torch.Tensor]) -> list[int]:
    """The sequences in an order in which those with common beginnings are neighbours."""
    texts = [sequence.numpy().tobytes() for sequence in sequences]
    return sorted(range(len(texts)), key=texts.__getitem__)


def _common(first: torch.Tensor, second: torch.Tensor) -> int:
    """The number of tokens that both begin with."""
    length = min(len(first), len(second))
    differences = (first[:length] != second[:length]).nonzero()
    return int(differences[0]) if len(differences) else length


def _paths(
    order: Sequence[int], shared: Sequence[int], new_rows: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """For each sequence the rows of its tokens."""
    paths = list(new_rows)
    for before, number in pairwise(order):
        count = shared[number]
        paths[number] = torch.cat([paths[before][:count], new_rows[number][count:]])
    return paths


def _score_paths(
    order: Sequence[int],
    shared: Sequence[int],
    new_rows: Sequence[torch.Tensor],
    slots: dict[int, int],
) -> list[torch.Tensor]:
    """For each sequence the places of the scores of its actions; `slots`: of branching sequences,
    the place for the first token of their own."""
    paths = [rows[:-1] for rows in new_rows]
    for before, number in pairwise(order):
        count = shared[number]
        if not count:
            continue
        if number not in slots:
            paths[number] = paths[before][: count - 1]
            continue
        branch = torch.tensor([slots[number]], dtype=torch.int64)
        later = new_rows[number][count:-1]
        paths[number] = torch.cat([paths[before][: count - 1], branch, later])
    return paths
