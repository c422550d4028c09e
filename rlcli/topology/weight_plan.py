"""Which rank sends which slices of which parameters when one role's weights are copied to another.

A plan is made from the blocks that each rank of both roles holds, whatever their layouts.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count

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
    slice comes from the target's rank if that holds it too; otherwise the holders share the
    sending, and none sends more than a twentieth above its fair share of a block. Pure: every rank
    of both roles plans its own slices, and both ends of a slice agree on it.

    Raises WorkerError if the sources do not have every element of a parameter that is followed, on
    the ranks that follow it; or if they lack a parameter.
    """
    shapes = {block.name: block.shape for blocks in sources.values() for block in blocks}
    _check_known({block.name for blocks in targets.values() for block in blocks}, shapes)
    holders, followers = _layouts(sources), _layouts(targets)
    leaving, arriving = (_by_name(blocks.get(rank, ())) for blocks in (sources, targets))
    buckets = []
    for names in _in_buckets(shapes, size):
        slices: list[Slice] = []
        for name in names:
            of_parameter = {
                *_arriving(rank, arriving.get(name, ()), holders[name], followers.get(name)),
                *_leaving(rank, leaving.get(name, ()), holders[name], followers.get(name)),
            }
            slices += sorted(of_parameter, key=_order)
        buckets.append(Bucket(frozenset(names), tuple(slices)))
    return buckets


def _check_known(followed: Set[str], shapes: Mapping[str, Sequence[int]]) -> None:
    if unknown := followed - shapes.keys():
        message = (
            f"a role follows the parameter {min(unknown)}, but the source has no such parameter"
        )
        raise WorkerError(message, code="F18")


class _Layout:
    """The blocks of a parameter that the ranks of one role hold."""

    def __init__(self, ranks: Mapping[WeightBlock, Sequence[int]]):
        """`ranks`: those that hold a block, ascending."""
        self.ranks = {block: tuple(holders) for block, holders in ranks.items()}
        offsets = list(zip(*(block.offsets for block in ranks), strict=True))
        self._axis = max(range(len(offsets)), key=lambda axis: len({*offsets[axis]}), default=None)
        self._blocks = sorted(ranks, key=self._start)
        self._starts = [self._start(block) for block in self._blocks]
        self._longest = max(map(self._size, ranks))

    def overlaps(self, block: WeightBlock) -> Iterator[tuple[WeightBlock, WeightBlock]]:
        """The blocks that have elements in common with this one, and their common regions."""
        start = self._start(block)
        first = bisect.bisect_right(self._starts, start - self._longest)
        last = bisect.bisect_left(self._starts, start + self._size(block))
        for candidate in self._blocks[first:last]:
            common = block.common(candidate)
            if common is not None:
                yield candidate, common

    def _start(self, block: WeightBlock) -> int:
        """Where it begins, along the axis along which most blocks are cut."""
        return block.offsets[self._axis] if self._axis is not None else 0

    def _size(self, block: WeightBlock) -> int:
        return block.sizes[self._axis] if self._axis is not None else 1


def _layouts(blocks: Blocks) -> dict[str, _Layout]:
    """Parameter → its layout."""
    ranks_of: dict[str, dict[WeightBlock, list[int]]] = {}
    for rank in sorted(blocks):
        for block in blocks[rank]:
            ranks_of.setdefault(block.name, {}).setdefault(block, []).append(rank)
    return {name: _Layout(ranks) for name, ranks in ranks_of.items()}


def _by_name(blocks: Sequence[WeightBlock]) -> dict[str, list[WeightBlock]]:
    by_name: dict[str, list[WeightBlock]] = {}
    for block in blocks:
        by_name.setdefault(block.name, []).append(block)
    return by_name


def _arriving(
    rank: int, blocks: Sequence[WeightBlock], holders: _Layout, followers: _Layout | None
) -> Iterator[Slice]:
    """What a rank gets of a parameter, for its blocks of the target."""
    for target_block in blocks:
        assert followers is not None
        overlaps = list(holders.overlaps(target_block))
        _check_complete(target_block, overlaps)
        for source_block, common in overlaps:
            sources = holders.ranks[source_block]
            if rank in sources:
                yield Slice(rank, rank, common, source_block, target_block)
                continue
            sharing = _Sharing.between(sources, followers.ranks[target_block])
            for source, region in sharing.senders_to(rank, common):
                yield Slice(source, rank, region, source_block, target_block)


def _leaving(
    rank: int, blocks: Sequence[WeightBlock], holders: _Layout, followers: _Layout | None
) -> Iterator[Slice]:
    """What a rank sends of a parameter, from its blocks of the source."""
    if followers is None:
        return
    for source_block in blocks:
        for target_block, common in followers.overlaps(source_block):
            sharing = _Sharing.between(holders.ranks[source_block], followers.ranks[target_block])
            for target, region in sharing.receivers_from(rank, common):
                yield Slice(rank, target, region, source_block, target_block)


@dataclass(frozen=True)
class _Sharing:
    """How the ranks that hold a block share the sending of it to those that need it.

    For an even share it is cut into pieces, and each piece for each target is one of as many
    messages, which the holders send in turn.
    """

    holders: tuple[int, ...]
    targets: tuple[int, ...]
    """The ranks that do not hold the block themselves."""
    pieces: int
    positions: Mapping[int, int]
    """Rank → its position among the holders, or among the targets."""

    @classmethod
    @lru_cache(maxsize=2**14)
    def between(cls, holders: tuple[int, ...], followers: tuple[int, ...]) -> _Sharing:
        holding = {*holders}
        targets = tuple(rank for rank in followers if rank not in holding)
        positions = {
            rank: position for group in (holders, targets) for position, rank in enumerate(group)
        }
        return cls(holders, targets, _piece_count(len(targets), len(holders)), positions)

    def senders_to(self, target: int, region: WeightBlock) -> Iterator[tuple[int, WeightBlock]]:
        pieces = _Pieces.of(region, self.pieces)
        for piece in range(pieces.number):
            message = self.positions[target] * pieces.number + piece
            yield self.holders[message % len(self.holders)], pieces[piece]

    def receivers_from(self, holder: int, region: WeightBlock) -> Iterator[tuple[int, WeightBlock]]:
        pieces = _Pieces.of(region, self.pieces)
        messages = len(self.targets) * pieces.number
        for message in range(self.positions[holder], messages, len(self.holders)):
            target, piece = divmod(message, pieces.number)
            yield self.targets[target], pieces[piece]


EVEN = 1.05
"""The busiest holder's messages, as a multiple of the mean."""


def _piece_count(targets: int, holders: int) -> int:
    """The least number of pieces for which the holders have nearly as many messages each."""
    if not targets:
        return 1

    def is_even(pieces: int) -> bool:
        messages = targets * pieces
        return -(-messages // holders) * holders <= EVEN * messages

    return next(pieces for pieces in count(1) if is_even(pieces))


@dataclass(frozen=True)
class _Pieces:
    """A region in pieces of nearly the same size, cut along its longest side."""

    region: WeightBlock
    axis: int
    number: int

    @classmethod
    def of(cls, region: WeightBlock, number: int) -> _Pieces:
        """As many pieces, or as many as there are rows along that side."""
        longest = max(region.sizes, default=1)
        axis = region.sizes.index(longest) if region.sizes else 0
        return cls(region, axis, min(number, longest))

    def __getitem__(self, position: int) -> WeightBlock:
        if self.number == 1:
            return self.region
        size = self.region.sizes[self.axis]
        start, end = (size * edge // self.number for edge in (position, position + 1))
        return self.region.along(self.axis, start, end)


def _check_complete(
    target_block: WeightBlock, overlaps: Sequence[tuple[WeightBlock, WeightBlock]]
) -> None:
    """Raise WorkerError if the sources do not hold every element of a block once."""
    is_whole = sum(common.numbers for _, common in overlaps) == target_block.numbers
    if not is_whole or any(block.shape != target_block.shape for block, _ in overlaps):
        name, shape = target_block.name, list(target_block.shape)
        raise WorkerError(
            f"the source does not hold every number of {name}, of shape {shape}, once", code="F18"
        )


def _order(moving: Slice) -> tuple[object, ...]:
    """Both ends of a pair have its slices in this order."""
    target = moving.target_block
    return moving.block.offsets, target.offsets, target.sizes, moving.source, moving.target


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
