"""The tensors that a rank holds, and their way to other ranks: point to point, as raw bytes, so
every dtype arrives unchanged.

They move in a thread and over a process group of their own,
so that a rank can send while it computes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from rlcli.api.data import SequenceSample
from rlcli.messaging.messages import Fields, Request
from rlcli.runtime.buffer import Transfer


class DataLane:
    """A rank's end of all transfers. Every rank makes one, at the same time."""

    def __init__(self, rank: int, store: SampleStore, device: torch.device, timeout: timedelta):
        self._rank = rank
        self._store = store
        self._device = device
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def handle(self, request: Request) -> Fields:
        """This rank's part of a plan, whose order is the same for all ranks:
        no cycle of waiting ranks can form."""
        for fields in request.args.get("transfers", ()):
            transfer = Transfer.from_json(fields)
            if transfer.source == self._rank:
                self._send(transfer)
            elif transfer.target == self._rank:
                self._store.add(self._receive(transfer))
        return {}

    def _send(self, transfer: Transfer) -> None:
        raw = _as_bytes(self._store.gather(transfer.ids, [transfer.key]).data[transfer.key])
        if len(raw):
            dist.send(raw, transfer.target, group=self._group)

    def _receive(self, transfer: Transfer) -> SequenceSample:
        described, key = transfer.description, transfer.key
        dtype, shape = described.dtypes[key], described.trailing_shapes[key]
        assert dtype is not None
        assert shape is not None
        rows = sum(described.flat_seqlens(key))
        raw = torch.empty(rows * math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        if len(raw):
            dist.recv(raw, transfer.source, group=self._group)
        tensor = raw.view(dtype).view(rows, *shape).to(self._device)
        return SequenceSample(
            ids=list(described.ids),
            seqlens=described.seqlens,
            data={key: tensor},
            metadata=described.metadata,
        )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] in host memory, from where gloo sends."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


class SampleStore:
    """Samples of batch size 1. Tensors are never written to once they are in here, so they may be
    read without a lock; the lock guards which keys a sample has."""

    def __init__(self) -> None:
        self._samples: dict[str, SequenceSample] = {}
        self._lock = threading.Lock()

    def add(self, batch: SequenceSample) -> None:
        """Store the samples of a batch; existing ones get its keys in addition."""
        samples = batch.unpack()
        with self._lock:
            for sample in samples:
                id_ = str(sample.ids[0])
                if id_ in self._samples:
                    self._samples[id_].update_(sample)
                else:
                    self._samples[id_] = sample

    def gather(self, ids: Sequence[str], keys: Sequence[str]) -> SequenceSample:
        """These keys of these samples, as one batch."""
        with self._lock:
            selected = [self._samples[id_].select(keys) for id_ in ids]
        return SequenceSample.gather(selected)

    def sample(self, id_: str) -> SequenceSample:
        """A sample as it is now."""
        with self._lock:
            sample = self._samples[id_]
            return sample.select(list(sample.keys))

    def forget(self, ids: Sequence[str]) -> None:
        """Drop samples; unknown ids are ignored."""
        with self._lock:
            for id_ in ids:
                self._samples.pop(id_, None)
