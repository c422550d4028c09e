"""Tensors between workers: point to point, as raw bytes, so every dtype arrives unchanged.

They move in a thread and over a process group of their own, so that a rank can send while it computes.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlcli.api.data import SequenceSample
from rlcli.runtime.buffer import Transfer
from rlcli.runtime.messages import Request
from rlcli.runtime.sample_store import SampleStore


class DataLane:
    """A rank's end of all transfers. Every rank makes one, at the same time."""

    def __init__(self, rank: int, store: SampleStore, device: torch.device, timeout: timedelta):
        self._rank = rank
        self._store = store
        self._device = device
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def handle(self, request: Request) -> dict[str, Any]:
        """This rank's part of a plan, whose order is the same for all ranks: no cycle of waiting ranks can form."""
        began = time.perf_counter()
        for fields in request.args.get("transfers", ()):
            transfer = Transfer.from_json(fields)
            if transfer.source == self._rank:
                self._send(transfer)
            elif transfer.target == self._rank:
                self._store.add(self._receive(transfer))
        return {"seconds": time.perf_counter() - began}

    def _send(self, transfer: Transfer) -> None:
        raw = _as_bytes(_tensor(self._store.gather(transfer.ids, [transfer.key]), transfer.key))
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
            ids=list(described.ids), seqlens=described.seqlens, data={key: tensor}, metadata=described.metadata
        )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] in host memory, from where gloo sends."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _tensor(sample: SequenceSample, key: str) -> torch.Tensor:
    assert sample.data is not None
    tensor = sample.data[key]
    assert tensor is not None
    return tensor
