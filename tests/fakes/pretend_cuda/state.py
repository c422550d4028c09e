"""State of this process's pretend devices while the context is open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pretend_cuda.memory import Memory


@dataclass
class Devices:
    """All devices of one `pretend_cuda()`."""

    memory: list[Memory]
    generators: tuple[torch.Generator, ...]
    capability: tuple[int, int]
    current: int = 0
    streams: list[object] = field(default_factory=list)
    """The current stream of each device."""
    capturing: Any = None
    """The graph that operations are recorded in, if any."""

    @property
    def count(self) -> int:
        return len(self.memory)

    def index(self, device: torch.device | str | int | None) -> int:
        """The number of a device as named by users; the current one if none is named.

        Raises RuntimeError for a device that does not exist,
        ValueError for one that is not a CUDA device.
        """
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            if device.type != "cuda":
                raise ValueError(f"Expected a cuda device, but got: {device}")
            device = device.index
        number = self.current if device is None or device < 0 else device
        if number >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return number


_active: list[Devices] = []


def open_devices(devices: Devices) -> None:
    if _active:
        raise RuntimeError("the pretend device is in use already")
    _active.append(devices)


def close_devices() -> None:
    _active.clear()


def active() -> Devices:
    """Raises RuntimeError outside `pretend_cuda()`."""
    if not _active:
        raise RuntimeError("a tensor of the pretend device is used outside of `pretend_cuda()`")
    return _active[0]
