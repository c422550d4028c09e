"""Transfers weights from the ranks of one role to those of another that follows it,
whatever their layouts.

Both sides register once which blocks of which parameters each rank holds. From these every rank
makes the same plan: which rank sends which slices to which other rank, in buckets of whole
parameters. An engine that cannot say what its ranks hold is treated as if every rank held
everything: it gathers one parameter at a time. Besides its own weights, a rank holds at most one
message that it sends, and what it receives of a bucket.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from itertools import chain

import torch
import torch.distributed as dist

from rlcli.api.config import ModelVersion
from rlcli.api.dataflow import MFCDef, ParamReallocHook
from rlcli.api.engine import GivesParameters, HoldsWeights
from rlcli.api.model import Model
from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import WorkerError
from rlcli.runtime.roles import wait_for_device
from rlcli.topology import RolePlacement, Topology

BUCKET = 2**26
"""Elements of the parameters that move together: 256 MB of float32."""
DIGEST_ROW = 2**13
"""Elements that a digest sums at a time."""
TAIL = 5
"""Integers after the elements of a message: two of a digest,
and the three of the source's version."""

Blocks = Mapping[int, Sequence[WeightBlock]]
"""Rank → the blocks that it holds, in the order in which it reads them."""
RanksOfBlocks = dict[WeightBlock, list[int]]
"""Block of a parameter → the ranks that have it."""


def copy_hook(mfc: MFCDef) -> ParamReallocHook | None:
    """The copy of weights after a call."""
    return next((hook for hook in mfc.post_hooks if isinstance(hook, ParamReallocHook)), None)


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


Moved = tuple[Slice, torch.Tensor]
"""A slice and its elements."""


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


class WeightChannel:
    """A channel from one role to another. Every rank of the run makes every channel,
    in the same order."""

    def __init__(self, source: RolePlacement, target: RolePlacement):
        self.members = sorted({*source.ranks, *target.ranks})
        self.group = dist.new_group(self.members) if len(self.members) > 1 else None
        self.plan: list[Bucket] | None = None
        """Made with the first transfer."""


def make_channels(
    calls: Iterable[MFCDef], topology: Topology
) -> dict[tuple[str, str], WeightChannel]:
    """(source, target) → the channel of each copy."""
    ends = dict.fromkeys(
        (mfc.model_name, hook.target) for mfc in calls if (hook := copy_hook(mfc)) is not None
    )
    return {pair: WeightChannel(*(topology.placement(role) for role in pair)) for pair in ends}


class WeightTransfer(GivesParameters):
    """One copy of a source's parameters, as they arrive at a rank.
    All ranks of both roles take part."""

    def __init__(
        self,
        channel: WeightChannel,
        rank: int,
        device: torch.device,
        source: Model | None,
        target: HoldsWeights | None,
        bucket: int = BUCKET,
    ):
        """`source` and `target` on the ranks that have them; `bucket`: elements of a bucket."""
        self._channel = channel
        self._rank = rank
        self._device = device
        self._source = source
        self._target = target
        self._bucket = bucket
        self.version: ModelVersion | None = source.version if source is not None else None
        """The source's version, once the first bucket has arrived."""

    def wait_for_all(self) -> None:
        """Wait until all ranks of both roles have come to the transfer."""
        if self._channel.group is not None:
            present = torch.ones((), device=self._device)
            dist.all_reduce(present, group=self._channel.group)
            present.item()  # waits for the device

    def parameter_blocks(self) -> Iterator[tuple[WeightBlock, torch.Tensor]]:
        """The blocks that the target holds here, float32. Raises WorkerError if elements differ
        from what was sent."""
        readers = _readers(self._source.module) if self._source is not None else {}
        if self._channel.plan is None:
            self._channel.plan = self._make_plan(list(readers))
        for bucket in self._channel.plan:
            tensors = {
                block: read() for block, read in readers.items() if block.name in bucket.names
            }
            arrived: defaultdict[WeightBlock, list[Moved]] = defaultdict(list)
            for moved, numbers in self._exchange(bucket, tensors):
                arrived[moved.target_block].append((moved, numbers))
            for block in bucket.blocks_of_target(self._rank):
                tensor = torch.empty(block.sizes, device=self._device)
                for moved, numbers in arrived.pop(block):
                    tensor[moved.block.within(block)] = numbers
                yield block, tensor

    def finish(self) -> None:
        """Take part on a rank that does not hold the target."""
        for _ in self.parameter_blocks():
            pass

    # -- the plan ----------------------------------------------------------------------------------

    def _make_plan(self, of_source: Sequence[WeightBlock]) -> list[Bucket]:
        of_target = list(_readers(self._target)) if self._target is not None else []
        layouts = {
            rank: self._layouts_of(rank, [of_source, of_target]) for rank in self._channel.members
        }
        sources, targets = (
            {rank: layout[side] for rank, layout in layouts.items()} for side in (0, 1)
        )
        return plan_slices(sources, targets, self._bucket, self._rank)

    def _layouts_of(
        self, rank: int, layouts: Sequence[Sequence[WeightBlock]]
    ) -> list[list[WeightBlock]]:
        """The layouts of a rank as source and target, broadcast to the others; `layouts`:
        those of this rank."""
        text = json.dumps([[astuple(block) for block in blocks] for blocks in layouts]).encode()
        if self._channel.group is not None:
            length = torch.tensor([len(text)], device=self._device)
            dist.broadcast(length, rank, group=self._channel.group)
            text = text if rank == self._rank else bytes(int(length))
            raw = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
            dist.broadcast(raw, rank, group=self._channel.group)
            text = raw.cpu().numpy().tobytes()
        return [
            [WeightBlock(name, *map(tuple, rest)) for name, *rest in blocks]
            for blocks in json.loads(text)
        ]

    # -- a bucket ----------------------------------------------------------------------------------

    def _exchange(self, bucket: Bucket, tensors: Mapping[WeightBlock, torch.Tensor]) -> list[Moved]:
        """Send this rank's slices, and return those for it, float32 on its device.

        In round k a rank sends to the rank k places after it and receives from the one k places
        before it, so it holds one message at a time, however many ranks want the same slices.
        """
        arrived = self._read(bucket.pairs[self._rank, self._rank], tensors)
        members = self._channel.members
        position = members.index(self._rank)
        for shift in range(1, len(members)):
            target, source = members[(position + shift) % len(members)], members[position - shift]
            leaving = self._read(bucket.pairs[self._rank, target], tensors)
            arrived += self._swap(leaving, target, bucket.pairs[source, self._rank], source)
        return arrived

    def _swap(
        self, leaving: Sequence[Moved], target: int, coming: Sequence[Slice], source: int
    ) -> list[Moved]:
        """Send slices to one rank and receive others from another, if there are any."""
        group = self._channel.group
        numbers = sum(moving.block.numbers for moving in coming)
        received = torch.empty(numbers + 2 * TAIL, device=self._device)
        operations = []
        if leaving:
            operations.append(dist.P2POp(dist.isend, self._message(leaving), target, group))
        if coming:
            operations.append(dist.P2POp(dist.irecv, received, source, group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return self._opened(coming, received) if coming else []

    def _read(
        self, slices: Sequence[Slice], tensors: Mapping[WeightBlock, torch.Tensor]
    ) -> list[Moved]:
        regions = ((moving, moving.block.within(moving.source_block)) for moving in slices)
        return [
            (moving, tensors[moving.source_block][region].to(self._device, torch.float32))
            for moving, region in regions
        ]

    def _message(self, slices: Sequence[Moved]) -> torch.Tensor:
        """[n + 10] float32: the elements of all slices, end to end, then the bits of the tail."""
        assert self._source is not None
        numbers = torch.cat([tensor.reshape(-1) for _, tensor in slices])
        tail = torch.tensor(
            [*_digest(numbers), *astuple(self._source.version)], device=self._device
        )
        return torch.cat([numbers, tail.view(torch.float32)])

    def _opened(self, slices: Sequence[Slice], message: torch.Tensor) -> list[Moved]:
        numbers, tail = message[: -2 * TAIL], message[-2 * TAIL :]
        *digest, epoch, epoch_step, step = tail.clone().view(torch.int64).tolist()
        if _digest(numbers) != digest:
            raise WorkerError(
                "weights did not arrive as they were sent", where=f"rank {self._rank}", code="F18"
            )
        self.version = ModelVersion(epoch, epoch_step, step)
        parts = numbers.split([moving.block.numbers for moving in slices])
        return [
            (moving, part.view(moving.block.sizes))
            for moving, part in zip(slices, parts, strict=True)
        ]


class WeightCopies:
    """The copies of weights that a rank takes part in."""

    def __init__(
        self, calls: Iterable[MFCDef], topology: Topology, rank: int, device: torch.device
    ):
        self.torn: set[str] = set()
        """Roles whose last copy did not complete: they hold weights of two versions until they are
        restored, and are not used."""
        self._channels = make_channels(calls, topology)
        self._rank = rank
        self._device = device

    def check(self, role: str) -> None:
        """Raise WorkerError if a copy to this role has failed."""
        if role in self.torn:
            message = f"{role} has weights of two versions, because a copy to it failed"
            hint = "resume the run from its last checkpoint"
            raise WorkerError(message, where=f"rank {self._rank}", hint=hint, code="F18")

    def take_part(self, mfc: MFCDef, models: Mapping[str, Model]) -> float:
        """Take part in the copy after a call; `models`: those that this rank has. Returns its
        seconds since all ranks of source and follower were there."""
        hook = copy_hook(mfc)
        assert hook is not None
        source, follower = models.get(mfc.model_name), models.get(hook.target)
        channel = self._channels[mfc.model_name, hook.target]
        target = follower.module if follower is not None else None
        transfer = WeightTransfer(channel, self._rank, self._device, source, target)
        wait_for_device(self._device)
        transfer.wait_for_all()
        began = time.perf_counter()
        if follower is None:
            transfer.finish()
        else:
            self.torn.add(hook.target)
            follower.module.take_parameters(transfer, hook.eta)
            assert transfer.version is not None
            follower.version = replace(transfer.version)
            self.torn.discard(hook.target)
        wait_for_device(self._device)
        return time.perf_counter() - began


def _readers(engine: HoldsWeights) -> Mapping[WeightBlock, Callable[[], torch.Tensor]]:
    """The blocks of an engine on this rank, to be read in this order. An engine that cannot say
    what its ranks hold gathers whole parameters, one after the other."""
    blocks = engine.weight_blocks()
    if blocks is not None:
        return blocks
    parameters = engine.whole_parameters()

    def read_next(name: str) -> torch.Tensor:
        next_name, tensor = next(parameters)
        assert next_name == name, f"{next_name} is read before {name}"
        return tensor

    shapes = [(name, tensor.shape) for name, tensor in engine.whole_parameters()]
    return {WeightBlock.whole(name, shape): partial(read_next, name) for name, shape in shapes}


def _digest(flat: torch.Tensor) -> list[int]:
    """Sum of the bits of [n] float32, and sum of their products with their positions, modulo 2^64:
    a changed element changes the first, two swapped elements the second.
    The elements are not copied."""
    bits = flat.view(torch.int32)
    rows = len(bits) // DIGEST_ROW
    table, rest = bits[: rows * DIGEST_ROW].view(rows, DIGEST_ROW), bits[rows * DIGEST_ROW :]
    of_rows, of_columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    placed = _placed(of_rows) * DIGEST_ROW + _placed(of_columns)
    placed += _placed(rest.long()) + rest.sum() * rows * DIGEST_ROW
    return [int(of_rows.sum() + rest.sum()), int(placed)]


def _placed(sums: torch.Tensor) -> torch.Tensor:
    """The sum of [n] integers, each times its index."""
    return (sums * torch.arange(len(sums), device=sums.device)).sum()
