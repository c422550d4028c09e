"""Partitioning sequences: contiguous balanced parts, groups under a cap. No torch here."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


def flat2d(nested: Iterable[Iterable[T]]) -> list[T]:
    """[[a, b], [c]] → [a, b, c]."""
    return list(itertools.chain.from_iterable(nested))


@dataclass
class SequenceSplitSpec:
    """A split of a batch into contiguous, non-empty parts: `partitions`, `sizes`,
    or both if they agree."""

    partitions: list[tuple[int, int]] | None = None
    """(start, end) of every part, end excluded; the first starts at 0, each later one where the
    previous one ended."""
    sizes: list[int] | None = None
    """Number of samples in every part."""

    def __post_init__(self) -> None:
        if self.partitions is None:
            if self.sizes is None:
                raise ValueError("a SequenceSplitSpec needs partitions or sizes")
            ends = list(itertools.accumulate(self.sizes))
            self.partitions = list(zip([0, *ends], ends, strict=False))
        self.partitions = [(start, end) for start, end in self.partitions]
        _check_parts(self.partitions)
        sizes = [end - start for start, end in self.partitions]
        if self.sizes is not None and list(self.sizes) != sizes:
            raise ValueError(f"sizes {list(self.sizes)} contradict partitions {self.partitions}")
        self.sizes = sizes


def _check_parts(partitions: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError if they are not contiguous from 0 on, or one of them is empty."""
    if not partitions:
        raise ValueError("a SequenceSplitSpec needs at least one part")
    bound = 0
    for start, end in partitions:
        if start != bound:
            raise ValueError(
                f"part ({start}, {end}) does not start at {bound}, where the one before it ends"
            )
        if end <= start:
            raise ValueError(f"part ({start}, {end}) is empty")
        bound = end


def partition_balanced(nums: Sequence[int] | np.ndarray, k: int, min_size: int = 1) -> np.ndarray:
    """The k + 1 cut points of k contiguous parts with similar sums; ties go to the later cut.

    Dynamic programming over (prefix, number of parts): each state keeps the one cut with the
    smallest difference between its largest and smallest sum. Exact for k = 2, a good heuristic
    above. O(k · n²) time.
    """
    import numpy as np  # here, so that commands that split nothing do not load it

    prefix = np.concatenate([[0], np.cumsum(np.asarray(nums, dtype=np.int64))])
    best_cuts = _best_cuts(prefix, k, min_size)
    cut_points = [len(nums)]
    for parts in range(k, 1, -1):
        cut_points.append(int(best_cuts[parts, cut_points[-1]]))
    return np.array([0, *reversed(cut_points)], dtype=np.int64)


def _best_cuts(prefix: np.ndarray, k: int, min_size: int) -> np.ndarray:
    """[k + 1, n + 1] where to make the last cut of the first `end` items into `parts` parts;
    `prefix` [n + 1] holds the sums of the first items."""
    import numpy as np

    largest, smallest = prefix.copy(), prefix.copy()
    best_cuts = np.zeros((k + 1, len(prefix)), dtype=np.int64)
    for parts in range(2, k + 1):
        before = largest.copy(), smallest.copy()
        for end in range(parts * min_size, len(prefix)):
            cuts = np.arange((parts - 1) * min_size, end - min_size + 1)
            last_sums = prefix[end] - prefix[cuts]
            high = np.maximum(before[0][cuts], last_sums)
            low = np.minimum(before[1][cuts], last_sums)
            best = _last_minimum(high - low)
            largest[end], smallest[end] = high[best], low[best]
            best_cuts[parts, end] = cuts[best]
    return best_cuts


def _last_minimum(numbers: np.ndarray) -> int:
    return len(numbers) - 1 - int(numbers[::-1].argmin())


def min_abs_diff_partition(
    arr: Sequence[int] | np.ndarray, k: int, min_size: int = 1
) -> list[tuple[int, int]]:
    """(start, end) of k contiguous parts, each of at least `min_size` items,
    with sums as equal as possible."""
    import numpy as np  # here, so that commands that split nothing do not load it

    array = np.asarray(arr)
    if array.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, not of shape {array.shape}")
    if k < 1 or min_size < 1:
        raise ValueError(
            f"cannot cut into {k} parts of at least {min_size}: both must be at least 1"
        )
    if len(array) < k:
        raise ValueError(f"cannot cut {len(array)} items into {k} parts")
    if len(array) < k * min_size:
        raise ValueError(f"cannot cut {len(array)} items into {k} parts of at least {min_size}")
    points = partition_balanced(array, k, min_size).tolist()
    return list(itertools.pairwise(points))


def ffd_allocate(values: Sequence[int], capacity: int, min_groups: int = 1) -> list[list[int]]:
    """First-fit-decreasing: groups of indices with sums ≤ `capacity`,
    at least `min_groups` of them.

    Largest first; a value goes to the fitting group with the fewest items, and among these to the
    one with the smallest sum (Algorithm 1 of the AReaL paper). Nothing is added to a group until
    `min_groups` are open.
    """
    _check_allocation(values, capacity, min_groups)
    groups: list[list[int]] = []
    by_count: list[list[tuple[int, int]]] = [[]]
    """Number of items → a heap of (sum, group)."""
    for index in sorted(range(len(values)), key=lambda i: -values[i]):
        room = capacity - values[index]
        count = _fewest_items(by_count, room) if len(groups) >= min_groups else 0
        if count:
            total, group = heapq.heappop(by_count[count])
        else:
            total, group = 0, len(groups)
            groups.append([])
        groups[group].append(index)
        if len(by_count) == count + 1:
            by_count.append([])
        heapq.heappush(by_count[count + 1], (total + values[index], group))
    return groups


def _fewest_items(by_count: Sequence[Sequence[tuple[int, int]]], most: int) -> int:
    """The fewest items of a group whose sum is at most `most`; 0 if there is none."""
    fitting = (count for count, heap in enumerate(by_count) if heap and heap[0][0] <= most)
    return next(fitting, 0)


def _check_allocation(values: Sequence[int], capacity: int, min_groups: int) -> None:
    """Raise ValueError if no groups of these values can keep within `capacity`, or if there are too
    few values."""
    for index, value in enumerate(values):
        if value > capacity:
            raise ValueError(f"value {value} at index {index} is larger than capacity {capacity}")
    if len(values) < min_groups:
        raise ValueError(
            f"the number of values, {len(values)}, is smaller than min_groups, {min_groups}"
        )
