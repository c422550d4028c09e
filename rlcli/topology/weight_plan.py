"""Which rank sends which slices of which parameters when one role's weights are copied to another.

A plan is made from the blocks that each rank of both roles holds, whatever their layouts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import WorkerError

Blocks = Mapping[int, Sequence[WeightBlock]]
"""Rank → the blocks that it holds, in the order in which it reads them."""
RanksOfBlocks = dict[WeightBlock, list[int]]
"""Block of a parameter → the ranks that have it."""


@dataclass(frozen=True)
class Slice:
    """Elements that move from one rank to another, or stay on it."""

    source: int
    target: int
    block: WeightBlock
    """The elements to move."""
    source_block: WeightBlock
    """The block of the source that contains them."""
    target_block: WeightBlock
    """The block of the target that contains them."""


@dataclass(frozen=True)
class Bucket:
    """Parameters that move together."""

    names: frozenset[str]
    slices: tuple[Slice, ...]
    """Slices that a rank sends, receives or keeps."""

    def blocks_of_target(self, rank: int) -> list[WeightBlock]:
        """The blocks that the target has on a rank, in the order in which they are taken."""
        return list(
            dict.fromkeys(moving.target_block for moving in self.slices if moving.target == rank)
        )

    @cached_property
    def pairs(self) -> defaultdict[tuple[int, int], list[Slice]]:
        """(source, target) → what moves between them, in an order known to both; includes what
        stays on a rank."""
        by_pair: defaultdict[tuple[int, int], list[Slice]] = defaultdict(list)
        for moving in self.slices:
            by_pair[moving.source, moving.target].append(moving)
        return by_pair


def plan_slices(sources: Blocks, targets: Blocks, size: int, rank: int) -> list[Bucket]:
    """The buckets of a rank, each of at most `size` elements, or of one parameter that has more. A
    slice comes from the target's rank if that holds it too, else from the holder that has the least
    to send. Pure: every rank of both layouts makes the plan for itself,
    and it is the same on all of them.

    Raises WorkerError if the sources do not have every element of a parameter that is followed.
    """
    shapes = {block.name: block.shape for blocks in sources.values() for block in blocks}
    holders, followers = _by_name(sources), _by_name(targets)
    if unknown := [name for name in followers if name not in holders]:
        raise WorkerError(
            f"the parameter {unknown[0]} is to be followed, but the source has none of that name",
            code="F18",
        )
    load: Counter[int] = Counter()
    buckets = []
    for names in _in_buckets(shapes, size):
        slices = (_slices(holders[name], followers.get(name, {}), load, rank) for name in names)
        buckets.append(Bucket(frozenset(names), tuple(chain.from_iterable(slices))))
    return buckets


def _by_name(blocks: Blocks) -> dict[str, RanksOfBlocks]:
    """Parameter → its blocks, each with the ranks that have it."""
    ranks_of: dict[str, RanksOfBlocks] = {}
    for rank in sorted(blocks):
        for block in blocks[rank]:
            ranks_of.setdefault(block.name, {}).setdefault(block, []).append(rank)
    return ranks_of


def _slices(
    holders: RanksOfBlocks, followers: RanksOfBlocks, load: Counter[int], rank: int
) -> Iterator[Slice]:
    """The slices of a parameter that a rank sends or receives; `load`:
    numbers that each rank has to send."""
    for target_block, targets in followers.items():
        overlaps = [
            (block, common)
            for block in holders
            if (common := target_block.common(block)) is not None
        ]
        is_whole = sum(common.numbers for _, common in overlaps) == target_block.numbers
        if not is_whole or any(block.shape != target_block.shape for block in holders):
            name, shape = target_block.name, list(target_block.shape)
            raise WorkerError(
                f"the source does not hold every number of {name}, of shape {shape}, once",
                code="F18",
            )
        for source_block, common in overlaps:
            ranks = holders[source_block]
            for target in targets:
                source = target
                if target not in ranks:
                    source = min(ranks, key=load.__getitem__)
                    load[source] += common.numbers
                if rank in (source, target):
                    yield Slice(source, target, common, source_block, target_block)


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
