"""Transfers weights from the ranks of one role to those of another that follows it, whatever their layouts.

Both sides register once which blocks of which parameters each rank holds. From these every rank makes the same plan:
which rank sends which slices to which other rank, in buckets of whole parameters. An engine that cannot say what its
ranks hold is treated as if every rank held everything: it gathers one parameter at a time. Besides its own weights, a
rank holds at most one message that it sends, and what it receives of a bucket.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from rlcli.api.config import ModelVersion
from rlcli.api.dataflow import MFCDef, ParamReallocHook
from rlcli.api.engine import GivesParameters, HoldsWeights
from rlcli.api.model import Model
from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import WorkerError
from rlcli.topology import RolePlacement, Topology

BUCKET = 2**26
"""Elements of the parameters that move together: 256 MB of float32."""
DIGEST_ROW = 2**13
"""Elements that a digest sums at a time."""
TAIL = 5
"""Integers after the elements of a message: two of a digest, and the three of the source's version."""

Blocks = Mapping[int, Sequence[WeightBlock]]
"""Rank → the blocks that it holds, in the order in which it reads them."""


def remote_copy(mfc: MFCDef, topology: Topology) -> ParamReallocHook | None:
    """The copy after a call that goes to other ranks; any other copy is made where the call runs."""
    own = topology.placement(mfc.model_name).ranks
    return next((hook for hook in _copies(mfc) if topology.placement(hook.target).ranks != own), None)


def _copies(mfc: MFCDef) -> Iterator[ParamReallocHook]:
    yield from (hook for hook in mfc.post_hooks if isinstance(hook, ParamReallocHook))


class WeightChannel:
    """A channel from one role to another. Every rank of the run makes every channel, in the same order."""

    def __init__(self, source: RolePlacement, target: RolePlacement):
        self.members = sorted({*source.ranks, *target.ranks})
        self.group = dist.new_group(self.members) if len(self.members) > 1 else None
        self.plan: list[Bucket] | None = None
        """Made with the first transfer."""


def make_channels(calls: Iterable[MFCDef], topology: Topology) -> dict[tuple[str, str], WeightChannel]:
    """(source, target) → the channel of each copy."""
    ends = dict.fromkeys((mfc.model_name, hook.target) for mfc in calls for hook in _copies(mfc))
    return {pair: WeightChannel(*(topology.placement(role) for role in pair)) for pair in ends}


class WeightTransfer(GivesParameters):
    """One copy of a source's parameters, as they arrive at a rank. All ranks of both roles take part."""

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
        """The blocks that the target holds here, float32. Raises WorkerError if elements differ from what was sent."""
        given = _readers(self._source.module) if self._source is not None else {}
        if self._channel.plan is None:
            self._channel.plan = self._make_plan(list(given))
        for bucket in self._channel.plan:
            read = {block: reader() for block, reader in given.items() if block.name in bucket.names}
            arrived: dict[WeightBlock, list[tuple[Slice, torch.Tensor]]] = {}
            for one, numbers in self._exchange(bucket, read):
                arrived.setdefault(one.wanted, []).append((one, numbers))
            for block in bucket.wanted_by(self._rank):
                whole = torch.empty(block.sizes, device=self._device)
                for one, numbers in arrived.pop(block):
                    whole[one.block.within(block)] = numbers
                yield block, whole

    def finish(self) -> None:
        """Take part on a rank that does not hold the target."""
        for _ in self.parameter_blocks():
            pass

    # -- the plan --------------------------------------------------------------------------------------------

    def _make_plan(self, given: Sequence[WeightBlock]) -> list[Bucket]:
        wanted = list(_readers(self._target)) if self._target is not None else []
        blocks = {rank: self._blocks_of(rank, [given, wanted]) for rank in self._channel.members}
        held, followed = ({rank: both[side] for rank, both in blocks.items()} for side in (0, 1))
        return plan_slices(held, followed, self._bucket, self._rank)

    def _blocks_of(self, rank: int, own: Sequence[Sequence[WeightBlock]]) -> list[list[WeightBlock]]:
        """The layouts of a rank, broadcast to the others."""
        text = (
            json.dumps([[asdict(block) for block in blocks] for blocks in own]).encode() if rank == self._rank else b""
        )
        if self._channel.group is not None:
            length = torch.tensor([len(text)], device=self._device)
            dist.broadcast(length, rank, group=self._channel.group)
            raw = torch.frombuffer(bytearray(text or bytes(int(length))), dtype=torch.uint8).to(self._device)
            dist.broadcast(raw, rank, group=self._channel.group)
            text = raw.cpu().numpy().tobytes()
        return [[_block(fields) for fields in blocks] for blocks in json.loads(text)]

    # -- a bucket --------------------------------------------------------------------------------------------

    def _exchange(self, bucket: Bucket, read: Mapping[WeightBlock, torch.Tensor]) -> list[tuple[Slice, torch.Tensor]]:
        """Send this rank's slices, and return those for it, float32 on its device.

        In round k a rank sends to the rank k places after it and receives from the one k places before it, so it holds
        one message at a time, however many ranks want the same slices.
        """

        def own(source: int, target: int) -> list[tuple[Slice, torch.Tensor]]:
            slices = bucket.pairs.get((source, target), ())
            return [(one, self._part(read[one.held], one)) for one in slices]

        found = own(self._rank, self._rank)
        members = self._channel.members
        place = members.index(self._rank)
        for shift in range(1, len(members)):
            target, source = members[(place + shift) % len(members)], members[place - shift]
            operations, message = [], None
            if leaving := own(self._rank, target):
                sent = self._message([part for _, part in leaving])
                operations.append(dist.P2POp(dist.isend, sent, target, self._channel.group))
            if coming := bucket.pairs.get((source, self._rank)):
                message = torch.empty(sum(one.block.numbers for one in coming) + 2 * TAIL, device=self._device)
                operations.append(dist.P2POp(dist.irecv, message, source, self._channel.group))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            if coming and message is not None:
                found += self._opened(coming, message)
        return found

    def _part(self, held: torch.Tensor, one: Slice) -> torch.Tensor:
        return held[one.block.within(one.held)].to(self._device, torch.float32)

    def _message(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """[n + 10] float32: the elements of all slices, end to end, then the bits of the tail."""
        assert self._source is not None
        numbers = torch.cat([one.reshape(-1) for one in slices])
        tail = torch.tensor([*_digest(numbers), *astuple(self._source.version)], device=self._device)
        return torch.cat([numbers, tail.view(torch.float32)])

    def _opened(self, slices: Sequence[Slice], message: torch.Tensor) -> list[tuple[Slice, torch.Tensor]]:
        numbers, tail = message[: -2 * TAIL], message[-2 * TAIL :]
        *digest, epoch, epoch_step, step = tail.clone().view(torch.int64).tolist()
        if _digest(numbers) != digest:
            raise WorkerError("weights did not arrive as they were sent", where=f"rank {self._rank}", code="F18")
        self.version = ModelVersion(epoch, epoch_step, step)
        parts = numbers.split([one.block.numbers for one in slices])
        return [(one, part.view(one.block.sizes)) for one, part in zip(slices, parts, strict=True)]


def _readers(engine: HoldsWeights) -> Mapping[WeightBlock, Callable[[], torch.Tensor]]:
    """The blocks of an engine on this rank, to be read in this order."""
    held = engine.weight_blocks()
    return held if held is not None else _gathered(engine)


def _gathered(engine: HoldsWeights) -> Mapping[WeightBlock, Callable[[], torch.Tensor]]:
    """Readers for an engine that cannot say what its ranks hold: whole parameters, gathered one after the other."""
    shapes = [(name, whole.shape) for name, whole in engine.whole_parameters()]
    whole = engine.whole_parameters()
    return {WeightBlock.whole(name, shape): lambda: next(whole)[1] for name, shape in shapes}


def _block(fields: Mapping[str, Any]) -> WeightBlock:
    name, *numbers = (fields[key] for key in ("name", "shape", "offsets", "sizes"))
    return WeightBlock(name, *(tuple(one) for one in numbers))


def _digest(flat: torch.Tensor) -> list[int]:
    """Sum of the bits of [n] float32, and sum of their products with their positions, modulo 2^64: a changed element
    changes the first, two swapped elements the second. The elements are not copied."""
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
