"""What a backend says about the memory that its roles take: the contract behind `rlcli plan`. No torch here.

A backend offers its memory model by name, read like its other declarations without importing its file:

    MEMORY: ClassVar[str] = "_my_memory.MyMemory"

is the class `MyMemory` of `_my_memory.py`, a file next to the backend's. It must not import torch: a plan answers at
once. It is called with a `PlacedRole`. The plan leaves out the roles of a backend without one, and says so.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlcli.api.architecture import Architecture


class UnknownMemory(ValueError):
    """A memory model cannot speak for such a role; the text says why."""


@dataclass(frozen=True)
class PlacedRole:
    """A role, as far as its memory depends on it."""

    architecture: Architecture
    head: str
    """lm or value"""
    mesh: Mapping[str, int]
    """Size of every dimension: dp, tp, pp, cp, ep."""
    arguments: Mapping[str, Any]
    """Of the backend, defaults included."""
    calls: Collection[str]
    """What the graph asks of the role: train_step, inference, generate."""
    longest: int
    """Tokens of the longest sequence."""
    device: str
    """Kind of its devices: cuda, or cpu, whose memory is that of the host; auto, which is taken for cuda."""


@dataclass(frozen=True)
class Kept:
    """What a role keeps on the fullest of its devices between calls, from its second step on, in bytes."""

    weights: int
    optimizer: int = 0
    buffers: int = 0
    """For gradients, mostly: allocated while the role is loaded, and never given back."""

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.buffers


@dataclass(frozen=True)
class Parts:
    """What a call adds to the memory that is kept all the time, where it is highest, in bytes."""

    gradients: int = 0
    gathered: int = 0
    """Parameters of other ranks, and copies: of weights in the precision of the matrix products, or of a snapshot."""
    activations: int = 0
    cache: int = 0
    """Keys and values."""
    logits: int = 0

    @property
    def total(self) -> int:
        return self.gradients + self.gathered + self.activations + self.cache + self.logits


@dataclass(frozen=True)
class Generation:
    """What a data-parallel rank is asked to generate."""

    prompts: int
    responses: int
    """To each prompt."""
    prompt_tokens: int
    """Of the longest prompt."""
    new_tokens: int
    """Of the longest response."""
    at_once: int
    """Most responses that are decoded together."""


class MemoryModel(abc.ABC):
    """The memory of a role on the fullest of its devices, under one backend. Made from a `PlacedRole`; raises
    UnknownMemory there for what it cannot estimate. Phases that the backend does not offer are never asked for."""

    WITHIN_PERCENT: ClassVar[int] = 15
    """How far its estimates of a peak may be from what is measured."""

    def __init__(self, role: PlacedRole):
        self.role = role

    @abc.abstractmethod
    def kept(self) -> Kept:
        """Between calls."""

    @abc.abstractmethod
    def load(self) -> Parts:
        """While its weights are loaded; of `kept()` weights and buffers are there then."""

    def snapshot(self) -> int:
        """What a checkpoint copies to host memory of this rank's part, until it is written."""
        kept = self.kept()
        return kept.weights + kept.optimizer

    def update(self, tokens: int, micro_batches: int) -> Parts:
        """Forward and backward of micro-batches, the largest of so many tokens, and the optimizer."""
        raise NotImplementedError(f"{type(self).__name__} does not train")

    def inference(self, tokens: int) -> Parts:
        """A forward pass over a micro-batch of so many tokens."""
        raise NotImplementedError(f"{type(self).__name__} has no forward pass")

    def generate(self, asked: Generation) -> Parts:
        """Responses to prompts."""
        raise NotImplementedError(f"{type(self).__name__} does not generate")
