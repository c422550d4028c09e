"""How a backend estimates the memory that its roles take: the contract behind `rlcli plan`.
No torch here.

A backend declares its memory model by name, which is read without importing its file, as its other
declarations are:

    MEMORY: ClassVar[str] = "_my_memory.MyMemory"

names the class `MyMemory` in `_my_memory.py`, a file next to the backend's. That file must not
import torch, so that a plan is quick. The class is called with a `PlacedRole`. A plan omits the
roles of a backend without one, and says so.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlcli.api.architecture import Architecture


class UnknownMemory(ValueError):
    """A memory model cannot estimate such a role; the text says why."""


@dataclass(frozen=True)
class PlacedRole:
    """The properties of a role that its memory depends on."""

    architecture: Architecture
    head: str
    """lm or value."""
    mesh: Mapping[str, int]
    """Size of every dimension: dp, tp, pp, cp, ep."""
    arguments: Mapping[str, Any]
    """The backend's arguments, including defaults."""
    calls: Collection[str]
    """The role's calls in the graph: train_step, inference, generate."""
    longest: int
    """Length of the longest sequence, in tokens."""
    device: str
    """Kind of its devices: cuda; cpu, whose memory is that of the host; or auto,
    which is treated as cuda."""


@dataclass(frozen=True)
class Kept:
    """What a role keeps on the fullest of its devices between calls, from its second step on,
    in bytes."""

    weights: int
    optimizer: int = 0
    buffers: int = 0
    """Mostly for gradients: allocated while the role is loaded, and never released."""

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.buffers


@dataclass(frozen=True)
class Parts:
    """What a call adds, at its peak, to the memory that is kept all the time, in bytes."""

    gradients: int = 0
    gathered: int = 0
    """Parameters of other ranks, and copies: of weights in the precision of the matrix products,
    or of a snapshot."""
    activations: int = 0
    cache: int = 0
    """Keys and values."""
    logits: int = 0

    @property
    def total(self) -> int:
        return self.gradients + self.gathered + self.activations + self.cache + self.logits


@dataclass(frozen=True)
class ServerMemory:
    """What a server takes on each of its devices, and what is sent to it, in bytes."""

    weights: int
    cache: int
    """Keys and values, and whatever else it reserves while it runs."""
    sent: int
    """Bytes sent to all its devices together, each time its weights change."""
    at_once: int = 0
    """Responses that a rank requests at once of all its servers."""
    per_token: int = 0
    """Bytes of the keys and values of a response, per token."""

    @property
    def total(self) -> int:
        return self.weights + self.cache


@dataclass(frozen=True)
class Generation:
    """The generation workload of a data-parallel rank."""

    prompts: int
    responses: int
    """Responses to each prompt."""
    prompt_tokens: int
    """Length of the longest prompt."""
    new_tokens: int
    """Length of the longest response."""
    at_once: int
    """Maximum number of responses decoded together."""


class MemoryModel(abc.ABC):
    """The memory of a role on the fullest of its devices, under one backend. Constructed from a
    `PlacedRole`; that raises UnknownMemory for what it cannot estimate. Phases that the backend
    does not offer are never requested."""

    WITHIN_PERCENT: ClassVar[int] = 15
    """How far its estimates of a peak may be from the measured value."""

    def __init__(self, role: PlacedRole):
        self.role = role

    @abc.abstractmethod
    def resident(self) -> Kept:
        """Memory kept between calls."""

    @abc.abstractmethod
    def load(self) -> Parts:
        """Memory added while its weights are loaded; of `resident()`,
        the weights and buffers are present then."""

    def snapshot(self) -> int:
        """Bytes of this rank's part that a checkpoint copies to host memory until it is written."""
        resident = self.resident()
        return resident.weights + resident.optimizer

    def update(self, tokens: int, micro_batches: int) -> Parts:
        """Forward and backward passes of micro-batches, the largest of `tokens` tokens,
        and the optimizer."""
        raise NotImplementedError(f"{type(self).__name__} does not train")

    def inference(self, tokens: int) -> Parts:
        """A forward pass over a micro-batch of `tokens` tokens."""
        raise NotImplementedError(f"{type(self).__name__} has no forward pass")

    def generate(self, asked: Generation) -> Parts:
        """Generating responses to prompts."""
        raise NotImplementedError(f"{type(self).__name__} does not generate")

    def sent(self, tokens: int, micro_batches: int) -> Mapping[str, int]:
        """Bytes that a rank sends to others in an update of micro-batches of `tokens` tokens, by
        kind of message: all-gather, reduce-scatter, all-reduce, all-to-all, ring, pipeline. Of n
        ranks that gather or reduce S bytes, each sends (n - 1) / n · S, and twice that for an
        all-reduce. Empty if that is unknown, or if there is one rank."""
        return {}

    def savings(self) -> Sequence[Sequence[Mapping[str, Any]]]:
        """Arguments of the backend with which the role takes less memory and computes the same
        numbers, for `rlcli plan` to propose; alternatives of one kind together,
        the mildest first."""
        return ()

    def remarks(self) -> Sequence[str]:
        """What a plan says about the role's memory in addition to numbers."""
        return ()

    def server(self, device_bytes: int | None) -> ServerMemory | None:
        """One of the role's servers, on devices with `device_bytes` of memory, if known; None
        without servers."""
        return None
