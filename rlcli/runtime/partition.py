"""Which data-parallel rank works on which samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from rlcli.topology import RolePlacement

T = TypeVar("T")


def shares(items: Sequence[T], parts: int) -> list[list[T]]:
    """Contiguous, as equal as can be, the longer ones first. Roles on equal meshes get equal shares."""
    short, longer = divmod(len(items), parts)
    cuts = [0]
    for part in range(parts):
        cuts.append(cuts[-1] + short + (part < longer))
    return [list(items[a:b]) for a, b in pairwise(cuts)]


def share_by_rank(items: Sequence[T], placement: RolePlacement) -> dict[int, list[T]]:
    """Rank → its share; ranks of one data-parallel replica get the same share."""
    replica = len(placement.ranks) // placement.mesh.dp
    parts = shares(items, placement.mesh.dp)
    return {rank: parts[place // replica] for place, rank in enumerate(placement.ranks)}


def owners(placement: RolePlacement) -> tuple[int, ...]:
    """The ranks whose outputs count: the first of each data-parallel replica."""
    replica = len(placement.ranks) // placement.mesh.dp
    return placement.ranks[::replica]
