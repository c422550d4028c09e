"""Parts of the tables and tensors of a batch. Importing this file does not import torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, overload

from rlcli.api.lengths import Lengths

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")


def at(items: Sequence[Item], indices: Iterable[int]) -> list[Item]:
    return [items[index] for index in indices]


def copied(lengths: Iterable[Sequence[int]]) -> Lengths:
    """The lengths of each sample's sequences, in lists of their own."""
    return [list(inner) for inner in lengths]


@overload
def of_keys(table: Mapping[str, Item], keys: Iterable[str]) -> dict[str, Item]: ...
@overload
def of_keys(table: Mapping[str, Item] | None, keys: Iterable[str]) -> dict[str, Item] | None: ...
def of_keys(table: Mapping[str, Item] | None, keys: Iterable[str]) -> dict[str, Item] | None:
    return None if table is None else {key: table[key] for key in keys}


def renamed(table: Mapping[str, Item], names: Mapping[str, str]) -> dict[str, Item]:
    """The table with other names for its keys, in the order of these."""
    return {names[key]: table[key] for key in sorted(table, key=names.__getitem__)}


def are_inverse(forward: Iterable[int], backward: Iterable[int], count: int) -> bool:
    """Whether these are permutations of `count` indices, one the inverse of the other."""
    order, inverse = list(forward), list(backward)
    identity = list(range(count))
    are_permutations = sorted(order) == identity and sorted(inverse) == identity
    return are_permutations and at(order, inverse) == identity


def joined(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The rows of all tensors, one after another; None if there are none."""
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) < 2:
        return present[0] if present else None
    import torch

    return torch.cat(present)


def rows_of_samples(
    tensor: torch.Tensor | None, bounds: Sequence[int], indices: Sequence[int]
) -> torch.Tensor | None:
    """The rows of the samples with these indices: a view if they are contiguous, else a copy.
    `bounds`: where the rows of each sample begin, and those of the last one end."""
    if tensor is None:
        return None
    if not indices:
        return tensor[:0]
    if all(i + 1 == j for i, j in itertools.pairwise(indices)):
        return tensor[bounds[indices[0]] : bounds[indices[-1] + 1]]
    import torch

    return torch.cat([tensor[bounds[i] : bounds[i + 1]] for i in indices])
