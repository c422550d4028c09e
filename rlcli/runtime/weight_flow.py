"""Transfers weights from the ranks of one role to those of another that follows it,
whatever their layouts.

Both sides register once which blocks of which parameters each rank holds. From these every rank
makes the same plan: which rank sends which slices to which other rank, in buckets of whole
parameters. An engine that cannot say what its ranks hold is treated as if every rank held
everything: it gathers one parameter at a time. Besides its own weights, a rank holds at most one
message that it sends, and what it receives of a bucket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from rlcli.api.config import ModelVersion
from rlcli.api.dataflow import MFCDef, Transfer
from rlcli.api.engine import GivesParameters, HoldsWeights
from rlcli.api.model import Model
from rlcli.api.timing import apart
from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import WorkerError
from rlcli.failpoints import failpoint
from rlcli.runtime.pausing import PausingEngine
from rlcli.runtime.roles import wait_for_device
from rlcli.runtime.weight_wire import DeltaWire, Moved, Neighbours, ReadsBase, WholeWire, Wire
from rlcli.topology import RolePlacement, Topology
from rlcli.topology.weight_plan import (
    Bucket,
    RankLayout,
    Slice,
    decode_layouts,
    encode_layouts,
    plan_slices,
)

BUCKET = 2**26
"""Elements of the parameters that move together: 256 MB of float32."""
WIRES: Mapping[Transfer, Callable[[torch.device], Wire]] = {"full": WholeWire, "delta": DeltaWire}
Readers = Mapping[WeightBlock, Callable[[], torch.Tensor]]
"""Blocks of an engine on this rank, each with what reads it, in the order of reading."""


class WeightChannel:
    """A channel from one role to another. Every rank of the run makes every channel,
    in the same order."""

    def __init__(self, source: RolePlacement, target: RolePlacement, wire: Wire):
        self.members = sorted({*source.ranks, *target.ranks})
        self.group = dist.new_group(self.members) if len(self.members) > 1 else None
        self.plan: list[Bucket] | None = None
        """Made with the first transfer."""
        self.wire = wire


def make_channels(
    calls: Iterable[MFCDef], topology: Topology, device: torch.device
) -> dict[tuple[str, str], WeightChannel]:
    """(source, target) → the channel of each copy."""
    hooks = [(mfc.model_name, mfc.weight_copy) for mfc in calls if mfc.weight_copy is not None]
    transfers = {(source, hook.target): hook.transfer for source, hook in hooks}
    return {
        (source, target): WeightChannel(
            topology.placement(source), topology.placement(target), WIRES[transfer](device)
        )
        for (source, target), transfer in transfers.items()
    }


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

    @property
    def version(self) -> ModelVersion | None:
        """The source's version, once the first bucket has arrived."""
        return self._channel.wire.version if self._source is None else self._source.version

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
            arrived: defaultdict[WeightBlock, list[Moved]] = defaultdict(list)
            for moved, numbers in self._exchange(bucket, _read_bucket(readers, bucket)):
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
        mine = (RankLayout.of(blocks) for blocks in (of_source, of_target))
        parameters, cuts = (self._gathered(text) for text in encode_layouts(mine))
        sources, targets = decode_layouts(self._channel.members, parameters, cuts)
        return plan_slices(sources, targets, self._bucket, self._rank)

    def _gathered(self, text: bytes) -> list[bytes]:
        """The texts of all members."""
        group, members = self._channel.group, self._channel.members
        if group is None:
            return [text]
        length = torch.tensor([len(text)], device=self._device)
        lengths = [torch.empty_like(length) for _ in members]
        dist.all_gather(lengths, length, group=group)
        sizes = [int(size) for size in lengths]
        padded = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8)
        texts = [torch.empty_like(padded, device=self._device) for _ in members]
        dist.all_gather(texts, padded.to(self._device), group=group)
        return [
            gathered[:size].cpu().numpy().tobytes()
            for gathered, size in zip(texts, sizes, strict=True)
        ]

    # -- a bucket ----------------------------------------------------------------------------------

    def _exchange(self, bucket: Bucket, tensors: Mapping[WeightBlock, torch.Tensor]) -> list[Moved]:
        """Send this rank's slices, and return those for it, float32 on its device.

        In round k a rank sends to the rank k places after it and receives from the one k places
        before it, so it holds one message at a time, however many ranks want the same slices.
        """
        arrived = self._read(bucket.between(self._rank, self._rank), tensors)
        members, wire = self._channel.members, self._channel.wire
        read_base = self._base_reader(bucket)
        version = self._source.version if self._source is not None else None
        position = members.index(self._rank)
        for shift in range(1, len(members)):
            target, source = members[(position + shift) % len(members)], members[position - shift]
            leaving = self._read(bucket.between(self._rank, target), tensors)
            coming = bucket.between(source, self._rank)
            neighbours = Neighbours(self._channel.group, self._device, target, source)
            arrived += wire.swap(leaving, version, coming, neighbours, read_base)
        wire.end_bucket()
        return arrived

    def _base_reader(self, bucket: Bucket) -> ReadsBase:
        """What the target holds of slices that arrive. An engine that gathers whole parameters has
        all its ranks read them together, and is not asked."""
        blocks = self._target.weight_blocks() if self._target is not None else None

        def read(coming: Sequence[Slice]) -> list[Moved] | None:
            if blocks is None:
                return None
            tensors = _read_bucket(blocks, bucket)
            return [
                (moving, tensors[moving.target_block][moving.block.within(moving.target_block)])
                for moving in coming
            ]

        return read

    def _read(
        self, slices: Sequence[Slice], tensors: Mapping[WeightBlock, torch.Tensor]
    ) -> list[Moved]:
        regions = ((moving, moving.block.within(moving.source_block)) for moving in slices)
        return [
            (moving, tensors[moving.source_block][region].to(self._device, torch.float32))
            for moving, region in regions
        ]


class WeightCopies:
    """The copies of weights that a rank takes part in."""

    def __init__(
        self, calls: Iterable[MFCDef], topology: Topology, rank: int, device: torch.device
    ):
        self.torn: set[str] = set()
        """Roles whose last copy did not complete: they hold weights of two versions until they are
        restored, and are not used."""
        self._channels = make_channels(calls, topology, device)
        self._rank = rank
        self._device = device

    def check(self, role: str) -> None:
        """Raise WorkerError if a copy to this role has failed."""
        if role in self.torn:
            message = f"{role} has weights of two versions, because a copy to it failed"
            hint = "resume the run from its last checkpoint"
            raise WorkerError(message, where=f"rank {self._rank}", hint=hint, code="F18")

    def take_part(
        self, mfc: MFCDef, models: Mapping[str, Model], pausing: Mapping[str, PausingEngine]
    ) -> int:
        """Take part in the copy after a call; `models`: those that this rank has; `pausing`: the
        roles that may be generating meanwhile. Returns the bytes that it sent.

        Its time is recorded since all ranks of source and follower were there."""
        hook = mfc.weight_copy
        assert hook is not None
        source, follower = models.get(mfc.model_name), models.get(hook.target)
        channel = self._channels[mfc.model_name, hook.target]
        target = follower.module if follower is not None else None
        transfer = WeightTransfer(channel, self._rank, self._device, source, target)
        wait_for_device(self._device)
        with apart("the other ranks of the copy"):
            transfer.wait_for_all()
        sent_before = channel.wire.bytes_sent
        if follower is None:
            transfer.finish()
        else:
            self._update(follower, transfer, hook.eta, pausing.get(hook.target))
        wait_for_device(self._device)
        return channel.wire.bytes_sent - sent_before

    def _update(
        self, follower: Model, transfer: WeightTransfer, eta: float, engine: PausingEngine | None
    ) -> None:
        """`engine`: the follower's, if it may be generating meanwhile."""
        take = (engine or follower.module).receive_parameters(transfer, eta)
        failpoint("weights.received")
        with engine.weights_may_change() if engine is not None else nullcontext():
            failpoint("weights.paused")
            self.torn.add(follower.name)
            take()
            assert transfer.version is not None
            follower.version = replace(transfer.version)
            self.torn.discard(follower.name)
            failpoint("weights.taken")


def _read_bucket(readers: Readers, bucket: Bucket) -> dict[WeightBlock, torch.Tensor]:
    return {block: read() for block, read in readers.items() if block.name in bucket.routes}


def _readers(engine: HoldsWeights) -> Readers:
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
