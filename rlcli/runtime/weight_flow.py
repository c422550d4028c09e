"""Weights from the ranks of one role to those of another that follows it, whatever their layouts.

The source gathers one parameter after the other, its first rank sends them in buckets, and each rank of the follower
takes its part of each. No rank holds more than two buckets, or the largest parameter, besides what is its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from rlcli.api.config import ModelVersion
from rlcli.api.dataflow import MFCDef, ParamReallocHook
from rlcli.api.engine import GivesParameters
from rlcli.api.model import Model
from rlcli.errors import WorkerError
from rlcli.topology import RolePlacement, Topology

BUCKET = 2**26
"""Numbers that are sent at once: 256 MB of float32."""

Bucket = list[tuple[str, torch.Tensor]]
"""Whole parameters, by name."""


def remote_copy(mfc: MFCDef, topology: Topology) -> ParamReallocHook | None:
    """The copy of a call that goes to other ranks; any other is done where the call runs."""
    own = topology.placement(mfc.model_name).ranks
    hooks = (hook for hook in mfc.post_hooks if isinstance(hook, ParamReallocHook))
    return next((hook for hook in hooks if topology.placement(hook.target).ranks != own), None)


class WeightChannel:
    """From one role to another. Every rank of the run makes every channel, in the same order."""

    def __init__(self, source: RolePlacement, target: RolePlacement):
        self.sender = source.ranks[0]
        self.members = sorted({self.sender, *target.ranks})
        self.group = dist.new_group(self.members)


def make_channels(calls: Iterable[MFCDef], topology: Topology) -> dict[tuple[str, str], WeightChannel]:
    """(source, target) → the channel of each copy between ranks."""
    channels: dict[tuple[str, str], WeightChannel] = {}
    for mfc in calls:
        hook = remote_copy(mfc, topology)
        if hook is not None and (mfc.model_name, hook.target) not in channels:
            ends = mfc.model_name, hook.target
            channels[ends] = WeightChannel(*(topology.placement(role) for role in ends))
    return channels


class WeightTransfer(GivesParameters):
    """The parameters of a source as they arrive at a rank. Ranks that only send go through them as well."""

    def __init__(
        self, channel: WeightChannel, rank: int, device: torch.device, source: Model | None, bucket: int = BUCKET
    ):
        """`source` is the role that is copied, on its ranks; `bucket` the numbers that are sent at once."""
        self._channel = channel
        self._rank = rank
        self._device = device
        self._source = source
        self._bucket = bucket
        self.version: ModelVersion | None = None
        """That of the source, once the first bucket is here."""

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises WorkerError for a bucket that is not what was sent."""
        buckets = _buckets(self._source.module, self._bucket) if self._source is not None else None
        while True:
            own = next(buckets, []) if buckets is not None else None
            if self._rank not in self._channel.members:  # it has helped to gather
                if not own:
                    return
                continue
            bucket = self._broadcast(own)
            if not bucket:
                return
            yield from bucket

    def finish(self) -> None:
        """What is left, on a rank that keeps nothing of it."""
        for _ in self.whole_parameters():
            pass

    def _broadcast(self, own: Bucket | None) -> Bucket:
        sends = self._rank == self._channel.sender
        flat = _flat(own or [], self._device) if sends else torch.empty(0)
        header = self._header(own or []) if sends else b""
        sizes = self._exchanged(torch.tensor([len(header), len(flat), *_digest(flat)], dtype=torch.int64))
        length, numbers, *digest = sizes.tolist()
        if not numbers:
            return []
        raw = torch.frombuffer(bytearray(header or bytes(length)), dtype=torch.uint8)
        described = json.loads(bytes(self._exchanged(raw).tolist()))
        flat = self._exchanged(flat if sends else torch.empty(numbers))
        if _digest(flat) != digest:
            raise WorkerError("weights did not arrive as they were sent", where=f"rank {self._rank}", code="F18")
        self.version = ModelVersion(**described["version"])
        return _cut(flat, described["parameters"])

    def _header(self, bucket: Bucket) -> bytes:
        assert self._source is not None
        parameters = [[name, list(tensor.shape)] for name, tensor in bucket]
        return json.dumps({"version": asdict(self._source.version), "parameters": parameters}).encode()

    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the sender has, on this rank's device."""
        tensor = tensor.to(self._device)
        dist.broadcast(tensor, self._channel.sender, group=self._channel.group)
        return tensor


def _buckets(engine: GivesParameters, size: int) -> Iterator[Bucket]:
    bucket: Bucket = []
    numbers = 0
    for name, tensor in engine.whole_parameters():
        if bucket and numbers + tensor.numel() > size:
            yield bucket
            bucket, numbers = [], 0
        bucket.append((name, tensor))
        numbers += tensor.numel()
    if bucket:
        yield bucket


def _flat(bucket: Bucket, device: torch.device) -> torch.Tensor:
    """[n] float32: the numbers of all parameters, end to end."""
    flat = torch.empty(sum(tensor.numel() for _, tensor in bucket), device=device)
    start = 0
    for _, tensor in bucket:
        flat[start : start + tensor.numel()].copy_(tensor.reshape(-1))
        start += tensor.numel()
    return flat


def _cut(flat: torch.Tensor, parameters: list[list[Any]]) -> Bucket:
    sizes = [math.prod(shape) for _, shape in parameters]
    return [(name, part.view(shape)) for (name, shape), part in zip(parameters, flat.split(sizes), strict=True)]


def _digest(flat: torch.Tensor) -> list[int]:
    """Two sums over the bits of [n] float32, which a changed or misplaced number changes."""
    bits = flat.view(torch.int32)
    return [int(bits.sum(dtype=torch.int64)), int(bits[::3].sum(dtype=torch.int64))]
