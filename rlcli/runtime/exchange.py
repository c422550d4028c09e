"""Tensors between workers: point to point by torch.distributed, as raw bytes, so every dtype arrives as it left."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence

import torch
import torch.distributed as dist

from rlcli.api.data import SequenceSample
from rlcli.runtime.buffer import Transfer


def carry_out(
    plan: Sequence[Transfer], rank: int, samples: MutableMapping[str, SequenceSample], device: torch.device
) -> None:
    """This rank's part of the plan. All ranks go through it in the same order, so none waits for another in a ring."""
    for transfer in plan:
        if transfer.source == rank:
            raw = _as_bytes(torch.cat([_tensor(samples[id_], transfer.key) for id_ in transfer.ids]).to(device))
            if len(raw):
                dist.send(raw, transfer.target)
        elif transfer.target == rank:
            _receive(transfer, samples, device)


def _receive(transfer: Transfer, samples: MutableMapping[str, SequenceSample], device: torch.device) -> None:
    described, key = transfer.description, transfer.key
    dtype, shape = described.dtypes[key], described.trailing_shapes[key]
    assert dtype is not None
    assert shape is not None
    rows = sum(described.flat_seqlens(key))
    raw = torch.empty(rows * math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device)
    if len(raw):
        dist.recv(raw, transfer.source)
    received = SequenceSample(
        ids=list(described.ids), seqlens=described.seqlens, data={key: raw.view(dtype).view(rows, *shape)},
        metadata=described.metadata,
    )  # fmt: skip
    for sample in received.unpack():
        id_ = str(sample.ids[0])
        if id_ in samples:
            samples[id_].update_(sample)
        else:
            samples[id_] = sample


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _tensor(sample: SequenceSample, key: str) -> torch.Tensor:
    assert sample.data is not None
    tensor = sample.data[key]
    assert tensor is not None
    return tensor
