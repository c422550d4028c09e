"""Which data-parallel rank works on which samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from rlcli.topology import RolePlacement

T = TypeVar("T")


def shares(items: Sequence[T], loads: Sequence[int], parts: int) -> list[list[T]]:
    """Contiguous shares, each cut where the sum of the loads before it is closest to its target. Roles on equal meshes
    get equal shares; some are empty if items are few or one of them outweighs the others."""
    sums = [0, *accumulate(loads)]
    cuts = [0]
    for part in range(1, parts):
        due = sums[-1] * part / parts
        after = bisect_left(sums, due)
        is_closer = after > 0 and due - sums[after - 1] < sums[after] - due
        cuts.append(max(cuts[-1], after - is_closer))
    return [list(items[a:b]) for a, b in pairwise([*cuts, len(items)])]


def share_by_rank(items: Sequence[T], loads: Sequence[int], placement: RolePlacement) -> dict[int, list[T]]:
    """Rank → its share; ranks of one data-parallel replica get the same share."""
    replica = len(placement.ranks) // placement.mesh.dp
    parts = shares(items, loads, placement.mesh.dp)
    return {rank: parts[place // replica] for place, rank in enumerate(placement.ranks)}


def owners(placement: RolePlacement) -> tuple[int, ...]:
    """The ranks whose outputs count: the first of each data-parallel replica."""
    replica = len(placement.ranks) // placement.mesh.dp
    return placement.ranks[::replica]
