"""Which rank sends which slices of which parameters to which other rank, to get weights from one layout to another.

Pure: a plan is made once for a pair of layouts, by every rank of both for itself, and is the same on all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import WorkerError

Blocks = Mapping[int, Sequence[WeightBlock]]
"""Rank → the blocks that it holds, in the order in which it reads them."""


@dataclass(frozen=True)
class Slice:
    """Elements that move from one rank to another, or stay on it."""

    source: int
    target: int
    block: WeightBlock
    """The elements to move."""
    held: WeightBlock
    """The block of the source that contains them."""
    wanted: WeightBlock
    """The block of the target that contains them."""


@dataclass(frozen=True)
class Bucket:
    """Parameters that move together."""

    names: frozenset[str]
    slices: tuple[Slice, ...]
    """Slices that a rank sends, receives or keeps."""

    def wanted_by(self, rank: int) -> list[WeightBlock]:
        """The blocks that the target has on a rank, in the order in which they are taken."""
        return list(dict.fromkeys(one.wanted for one in self.slices if one.target == rank))

    @cached_property
    def pairs(self) -> dict[tuple[int, int], list[Slice]]:
        """(source, target) → what moves between them, in an order known to both; includes what stays on a rank."""
        by_pair: dict[tuple[int, int], list[Slice]] = {}
        for one in self.slices:
            by_pair.setdefault((one.source, one.target), []).append(one)
        return by_pair


def plan_slices(held: Blocks, wanted: Blocks, size: int, rank: int) -> list[Bucket]:
    """The buckets of a rank, each of at most `size` elements, or of one parameter that has more. A slice comes from the
    rank that wants it if that rank holds it too, else from the holder that has the least to send.

    Raises WorkerError if the holders do not have every element of a parameter that is wanted.
    """
    shapes = {block.name: block.shape for blocks in held.values() for block in blocks}
    holders = _by_name(held)
    wanting = _by_name(wanted)
    if unknown := [name for name in wanting if name not in holders]:
        raise WorkerError(
            f"the parameter {unknown[0]} is to be followed, but the source has none of that name", code="F18"
        )
    load: Counter[int] = Counter()
    return [
        Bucket(
            frozenset(names),
            tuple(one for name in names for one in _slices(holders[name], wanting.get(name, {}), load, rank)),
        )
        for names in _in_buckets(shapes, size)
    ]


def _by_name(blocks: Blocks) -> dict[str, dict[WeightBlock, list[int]]]:
    """Parameter → its blocks, each with the ranks that have it."""
    ranks_of: dict[str, dict[WeightBlock, list[int]]] = {}
    for rank in sorted(blocks):
        for block in blocks[rank]:
            ranks_of.setdefault(block.name, {}).setdefault(block, []).append(rank)
    return ranks_of


def _slices(
    holders: Mapping[WeightBlock, Sequence[int]],
    wanting: Mapping[WeightBlock, Sequence[int]],
    load: Counter[int],
    rank: int,
) -> Iterator[Slice]:
    for wanted, targets in wanting.items():
        found = [(held, common) for held in holders if (common := wanted.common(held)) is not None]
        if any(block.shape != wanted.shape for block in holders) or sum(c.numbers for _, c in found) != wanted.numbers:
            message = f"the source does not hold every number of {wanted.name}, of shape {list(wanted.shape)}, once"
            raise WorkerError(message, code="F18")
        for held, common in found:
            ranks, numbers = holders[held], common.numbers
            own = set(ranks)
            for target in targets:
                if target in own:
                    source = target
                else:
                    source = min(ranks, key=load.__getitem__) if len(ranks) > 1 else ranks[0]
                    load[source] += numbers
                if rank in (source, target):
                    yield Slice(source, target, common, held, wanted)


def _in_buckets(shapes: Mapping[str, Sequence[int]], size: int) -> Iterator[list[str]]:
    names: list[str] = []
    numbers = 0
    for name, shape in shapes.items():
        count = WeightBlock.whole(name, shape).numbers
        if names and numbers + count > size:
            yield names
            names, numbers = [], 0
        names.append(name)
        numbers += count
    if names:
        yield names
