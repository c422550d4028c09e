"""The tensors that a rank holds, and their way to other ranks: point to point, as raw bytes, so
every dtype arrives unchanged.

They move in a thread and over a process group of their own,
so that a rank can send while it computes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import (
    ADVANTAGES,
    NOT_ENDED,
    PROMPT_MASK,
    REWARDS,
    SAMPLED_LOGPROBS,
    SEQUENCES,
)
from rlcli.runtime.buffer import Transfer
from rlcli.runtime.messages import Fields, Request


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
        began = time.perf_counter()
        for fields in request.args.get("transfers", ()):
            transfer = Transfer.from_json(fields)
            if transfer.source == self._rank:
                self._send(transfer)
            elif transfer.target == self._rank:
                self._store.add(self._receive(transfer))
        return {"seconds": time.perf_counter() - began}

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


Described = dict[str, dict[str, list[Any]]]
"""Sample → aspect of its responses → a value for each response."""


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


def describe_samples(
    store: SampleStore, tokenizer: Any, aspects: Mapping[str, Sequence[str]]
) -> Described:
    """Aspects of the responses of some samples for people to read:
    sample → aspect → a value for each response."""
    described: Described = {}
    for id_, of_sample in aspects.items():
        sample = store.sample(id_)
        described[id_] = {name: ASPECTS[name].values(sample, tokenizer) for name in of_sample}
    return described


def _texts(sample: SequenceSample, tokenizer: Any) -> list[Fields]:
    answer = sample.metadata.get("answer", [None])[0]
    shown_answer = None if answer is None else str(answer)
    lengths = sample.flat_seqlens(SEQUENCES)
    sequences = sample.data[SEQUENCES].cpu().split(lengths)
    masks = sample.data[PROMPT_MASK].cpu().split(lengths)
    return [
        {
            "prompt": tokenizer.decode(tokens[mask], skip_special_tokens=True),
            "response": tokenizer.decode(tokens[~mask], skip_special_tokens=True),
            "answer": shown_answer,
        }
        for tokens, mask in zip(sequences, masks, strict=True)
    ]


def _rewards(sample: SequenceSample, tokenizer: Any) -> list[float]:
    return sample.data[REWARDS].double().tolist()


def _finishes(sample: SequenceSample, tokenizer: Any) -> list[str]:
    return ["length" if cut else "stop" for cut in sample.data[NOT_ENDED].tolist()]


def _logprobs(sample: SequenceSample, tokenizer: Any) -> list[float]:
    """The log-prob of each response: the sum over its tokens."""
    return [float(logprobs.sum()) for logprobs in _of_responses(sample, SAMPLED_LOGPROBS)]


def _lengths(sample: SequenceSample, tokenizer: Any) -> list[int]:
    masks = sample.data[PROMPT_MASK].split(sample.flat_seqlens(SEQUENCES))
    return [int((~mask).sum()) for mask in masks]


def _advantages(sample: SequenceSample, tokenizer: Any) -> list[float | None]:
    """The advantage of each response: the mean over its tokens, None if it has none."""
    return [
        float(advantages.mean()) if len(advantages) else None
        for advantages in _of_responses(sample, ADVANTAGES)
    ]


def _of_responses(sample: SequenceSample, key: str) -> list[torch.Tensor]:
    """The values that a key with one for each token but the first has for the tokens of each
    response, in double precision."""
    values = sample.data[key].double().split(sample.flat_seqlens(key))
    masks = sample.data[PROMPT_MASK].split(sample.flat_seqlens(SEQUENCES))
    return [of_tokens[~mask[1:]] for of_tokens, mask in zip(values, masks, strict=True)]


@dataclass(frozen=True)
class Aspect:
    """Something to show of a sample's responses."""

    keys: tuple[str, ...]
    """What it is read from."""
    values: Callable[[SequenceSample, Any], list[Any]]
    """(sample, tokenizer) → one value for each response."""


TEXT = "text"
ASPECTS: Mapping[str, Aspect] = {
    TEXT: Aspect((SEQUENCES, PROMPT_MASK), _texts),
    "reward": Aspect((REWARDS,), _rewards),
    "finish": Aspect((NOT_ENDED,), _finishes),
    "logprob": Aspect((SAMPLED_LOGPROBS, PROMPT_MASK, SEQUENCES), _logprobs),
    "length": Aspect((SEQUENCES, PROMPT_MASK), _lengths),
    "advantage": Aspect((ADVANTAGES, PROMPT_MASK, SEQUENCES), _advantages),
}
"""What is shown of responses. Each aspect is described by a rank that has its keys."""
