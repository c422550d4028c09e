"""Which rank sends which slices of which parameters when one role's weights are copied to another.

A plan is made from the blocks that each rank of both roles holds, whatever their layouts. Models
have thousands of parameters and jobs thousands of ranks, but few ways in which all ranks cut a
parameter: slices are planned once for each way, and parameters get their names when they move.
"""

from __future__ import annotations

import bisect
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, NamedTuple

from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import WorkerError

Cut = tuple[WeightBlock, ...]
"""What a rank holds of a parameter: blocks without the parameter's name."""


@dataclass(frozen=True, eq=False)
class Parameters:
    """The parameters that a rank holds. Ranks that have the same share one object, which is equal
    to no other, because a large model has more names than it takes time to compare."""

    cut_of: Mapping[str, int]
    """Parameter → the number of its cut; in the order in which the rank reads them."""


class RankLayout(NamedTuple):
    """The blocks that a rank holds. A model has many parameters, and few ways to cut them."""

    parameters: Parameters
    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, blocks: Iterable[WeightBlock]) -> RankLayout:
        """`blocks`: in the order in which the rank reads them."""
        by_name: defaultdict[str, list[WeightBlock]] = defaultdict(list)
        for block in blocks:
            by_name[block.name].append(block.of(""))
        indices: dict[Cut, int] = {}
        cut_of = {
            name: indices.setdefault(tuple(cut), len(indices)) for name, cut in by_name.items()
        }
        return cls(Parameters(cut_of), tuple(indices))


Layouts = Mapping[int, RankLayout]
"""Rank → what it holds of a role."""


def encode_layouts(layouts: Iterable[RankLayout]) -> tuple[bytes, bytes]:
    """What a rank holds of several roles, for other ranks: parameters, and their cuts."""
    layouts = tuple(layouts)
    parameters = [layout.parameters.cut_of for layout in layouts]
    cuts = [layout.cuts for layout in layouts]
    return _encoded(parameters), _encoded(cuts)


def decode_layouts(
    ranks: Sequence[int], parameters: Sequence[bytes], cuts: Sequence[bytes]
) -> list[Layouts]:
    """For each role what the ranks hold, from what each of them has encoded. Texts that many ranks
    have sent are read once."""
    parameters_of = {text: list(map(Parameters, _decoded(text))) for text in {*parameters}}
    cuts_of = {text: list(map(_cuts, _decoded(text))) for text in {*cuts}}
    of_ranks = [
        list(map(RankLayout, parameters_of[names], cuts_of[blocks]))
        for names, blocks in zip(parameters, cuts, strict=True)
    ]
    return [dict(zip(ranks, of_role, strict=True)) for of_role in zip(*of_ranks, strict=True)]


def _encoded(value: object) -> bytes:
    return zlib.compress(json.dumps(value).encode(), level=1)


def _decoded(text: bytes) -> Any:
    return json.loads(zlib.decompress(text))


def _cuts(cuts: Any) -> tuple[Cut, ...]:
    return tuple(tuple(map(_block, cut)) for cut in cuts)


def _block(fields: Any) -> WeightBlock:
    name, *numbers = fields
    return WeightBlock(name, *map(tuple, numbers))


class Slice(NamedTuple):
    """Elements that move from one rank to another, or stay on it."""

    source: int
    target: int
    block: WeightBlock
    """The elements to move."""
    source_block: WeightBlock
    """The block of the source that contains them."""
    target_block: WeightBlock
    """The block of the target that contains them."""

    def of(self, name: str) -> Slice:
        """The same elements of a parameter of this name."""
        source, target, *blocks = self
        return Slice(source, target, *(block.of(name) for block in blocks))


@dataclass(frozen=True)
class Routes:
    """The slices of a parameter that a rank sends, receives or keeps; without the parameter's name,
    because all parameters that every rank cuts in the same way share them."""

    slices: tuple[Slice, ...]

    @cached_property
    def pairs(self) -> Mapping[tuple[int, int], list[Slice]]:
        """(source, target) → what moves between them, in an order known to both; includes what
        stays on a rank."""
        by_pair: dict[tuple[int, int], list[Slice]] = {}
        for moving in self.slices:
            by_pair.setdefault((moving.source, moving.target), []).append(moving)
        return by_pair


@dataclass(frozen=True)
class Bucket:
    """Parameters that move together."""

    routes: Mapping[str, Routes]
    """By the name of a parameter."""

    def between(self, source: int, target: int) -> list[Slice]:
        """What moves from one rank to another, in an order known to both."""
        pair = source, target
        return [
            moving.of(name)
            for name, routes in self.routes.items()
            for moving in routes.pairs.get(pair, ())
        ]

    def blocks_of_target(self, rank: int) -> list[WeightBlock]:
        """The blocks that the target has on a rank, in the order in which they are taken."""
        blocks: list[WeightBlock] = []
        for name, routes in self.routes.items():
            arriving = (moving for moving in routes.slices if moving.target == rank)
            blocks += (block.of(name) for block in dict.fromkeys(m.target_block for m in arriving))
        return blocks


def plan_slices(sources: Layouts, targets: Layouts, size: int, rank: int) -> list[Bucket]:
    """The buckets of a rank, each of at most `size` elements, or of one parameter that has more. A
    slice comes from the target's rank if that holds it too; otherwise the holders share the
    sending, and none sends more than a twentieth above its fair share of a block. Pure: every rank
    of both roles plans its own slices, and both ends of a slice agree on it.

    Raises WorkerError if the sources do not have every element of a parameter that is followed, on
    the ranks that follow it; or if they lack a parameter.
    """
    kinds = _kinds([*sources.values(), *targets.values()])
    holders, followers = (_layouts_by_kind(layouts, kinds) for layouts in (sources, targets))
    _check_known(kinds, holders)
    routes: dict[int, Routes] = {}
    for name, kind in kinds.items():
        if kind not in routes:
            routes[kind] = _routes(rank, name, holders[kind], followers.get(kind))
    numbers = {name: holders[kind].numbers for name, kind in kinds.items()}
    in_buckets = _in_buckets(numbers, size)
    return [Bucket({name: routes[kinds[name]] for name in names}) for names in in_buckets]


def _kinds(layouts: Iterable[RankLayout]) -> dict[str, int]:
    """Parameter → a number that it shares with all parameters which every rank cuts as it does."""
    cuts_of: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for group, parameters in enumerate(dict.fromkeys(layout.parameters for layout in layouts)):
        for name, cut in parameters.cut_of.items():
            cuts_of[name].append((group, cut))
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    return {name: numbers.setdefault(tuple(cuts), len(numbers)) for name, cuts in cuts_of.items()}


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
        self.numbers = math.prod(next(iter(ranks)).shape)
        """Elements of the whole parameter."""

    def blocks_of(self, rank: int) -> list[WeightBlock]:
        return [block for block, ranks in self.ranks.items() if rank in ranks]

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


def _layouts_by_kind(layouts: Layouts, kinds: Mapping[str, int]) -> dict[int, _Layout]:
    """Kind → the layout of a parameter of this kind."""
    cuts_by_kind: dict[Parameters, dict[int, int]] = {}
    for parameters in {layout.parameters for layout in layouts.values()}:
        cuts_by_kind[parameters] = {kinds[name]: cut for name, cut in parameters.cut_of.items()}
    ranks_of: dict[int, dict[WeightBlock, list[int]]] = {}
    for rank in sorted(layouts):
        parameters, cuts = layouts[rank]
        for kind, cut in cuts_by_kind[parameters].items():
            ranks_of_blocks = ranks_of.setdefault(kind, {})
            for block in cuts[cut]:
                ranks_of_blocks.setdefault(block, []).append(rank)
    return {kind: _Layout(ranks) for kind, ranks in ranks_of.items()}


def _check_known(kinds: Mapping[str, int], holders: Mapping[int, _Layout]) -> None:
    if unknown := [name for name, kind in kinds.items() if kind not in holders]:
        message = (
            f"a role follows the parameter {min(unknown)}, but the source has no such parameter"
        )
        raise WorkerError(message, code="F18")


def _routes(rank: int, name: str, holders: _Layout, followers: _Layout | None) -> Routes:
    """`name`: of one of the parameters of this kind."""
    if followers is None:
        return Routes(())
    slices = {*_arriving(rank, name, holders, followers), *_leaving(rank, holders, followers)}
    return Routes(tuple(sorted(slices, key=_order)))


def _arriving(rank: int, name: str, holders: _Layout, followers: _Layout) -> Iterator[Slice]:
    """What a rank gets of a parameter, for its blocks of the target."""
    for target_block in followers.blocks_of(rank):
        overlaps = list(holders.overlaps(target_block))
        _check_complete(name, target_block, overlaps)
        for source_block, common in overlaps:
            sources = holders.ranks[source_block]
            if rank in sources:
                yield Slice(rank, rank, common, source_block, target_block)
                continue
            sharing = _Sharing.between(sources, followers.ranks[target_block])
            for source, region in sharing.senders_to(rank, common):
                yield Slice(source, rank, region, source_block, target_block)


def _leaving(rank: int, holders: _Layout, followers: _Layout) -> Iterator[Slice]:
    """What a rank sends of a parameter, from its blocks of the source."""
    for source_block in holders.blocks_of(rank):
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
    """Ascending."""
    targets: tuple[int, ...]
    """The ranks that do not hold the block themselves, ascending."""
    pieces: int

    @classmethod
    @lru_cache(maxsize=2**14)
    def between(cls, holders: tuple[int, ...], followers: tuple[int, ...]) -> _Sharing:
        holding = {*holders}
        targets = tuple(rank for rank in followers if rank not in holding)
        return cls(holders, targets, _piece_count(len(targets), len(holders)))

    def senders_to(self, target: int, region: WeightBlock) -> Iterator[tuple[int, WeightBlock]]:
        pieces = _Pieces.of(region, self.pieces)
        first = bisect.bisect_left(self.targets, target) * pieces.number
        for piece in range(pieces.number):
            yield self.holders[(first + piece) % len(self.holders)], pieces[piece]

    def receivers_from(self, holder: int, region: WeightBlock) -> Iterator[tuple[int, WeightBlock]]:
        pieces = _Pieces.of(region, self.pieces)
        messages = len(self.targets) * pieces.number
        position = bisect.bisect_left(self.holders, holder)
        for message in range(position, messages, len(self.holders)):
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
    name: str, target_block: WeightBlock, overlaps: Sequence[tuple[WeightBlock, WeightBlock]]
) -> None:
    """Raise WorkerError if the sources do not hold every element of a block once."""
    is_whole = sum(common.numbers for _, common in overlaps) == target_block.numbers
    if not is_whole or any(block.shape != target_block.shape for block, _ in overlaps):
        shape = list(target_block.shape)
        raise WorkerError(
            f"the source does not hold every number of {name}, of shape {shape}, once", code="F18"
        )


def _order(moving: Slice) -> tuple[object, ...]:
    """Both ends of a pair have its slices in this order."""
    target = moving.target_block
    return moving.block.offsets, target.offsets, target.sizes, moving.source, moving.target


def _in_buckets(numbers: Mapping[str, int], size: int) -> Iterator[list[str]]:
    """`numbers`: parameter → its elements."""
    names: list[str] = []
    total = 0
    for name, number in numbers.items():
        if names and total + number > size:
            yield names
            names, total = [], 0
        names.append(name)
        total += number
    if names:
        yield names
