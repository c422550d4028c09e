"""Gives each device its own random stream; the host's is unaffected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch

from pretend_cuda.placement import Device
from pretend_cuda.state import active


class DeviceGenerator(torch._C.Generator):
    """A device's random stream. It uses the host's algorithm, whose numbers differ from CUDA's."""

    _of: int

    @staticmethod
    def on(index: int) -> DeviceGenerator:
        generator = DeviceGenerator("cpu")
        generator._of = index
        _of_devices[generator._cdata] = generator  # type: ignore[attr-defined]
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self._of)


_of_devices: WeakValueDictionary[int, DeviceGenerator] = WeakValueDictionary()
"""By address: C++ passes generators on without their Python class."""


class _EitherKind(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(metaclass=_EitherKind):
    """`torch.Generator` where there are devices: `Generator()` is for the host,
    `Generator("cuda")` for a device."""

    def __new__(cls, device: torch.device | str | int = "cpu") -> Any:
        if not isinstance(device, int) and torch.device(device).type == "cpu":
            return torch._C.Generator("cpu")
        return DeviceGenerator.on(active().index(device))


def check_generator(generator: torch.Generator, device: Device) -> None:
    """Raises RuntimeError unless the generator passed to a call is on the device of its result."""
    kind = "cuda" if generator._cdata in _of_devices else "cpu"  # type: ignore[attr-defined]
    expected = "cpu" if device is None else "cuda"
    if kind != expected:
        raise RuntimeError(f"Expected a '{expected}' device type for generator but found '{kind}'")


@contextlib.contextmanager
def random_stream_of(device: int) -> Iterator[None]:
    """Random operations draw from the stream of a device."""
    stream, host = active().generators[device], torch.default_generator
    host_state = host.get_state()
    host.set_state(stream.get_state())
    try:
        yield
    finally:
        stream.set_state(host.get_state())
        host.set_state(host_state)
