"""Replacements for `torch.cuda` and `torch.accelerator` while there are pretend devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from pretend_cuda.graphs import torch_cuda_graphs
from pretend_cuda.state import active

Answers = dict[str, Any]
NAME = "Pretend CUDA device"
PROCESSORS = 108


class DeviceStream:
    """Work on it is done as soon as it is queued."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any):
        self.device = torch.device("cuda", active().index(device))
        self.device_index = self.device.index
        self.priority = priority
        self.stream_id = self.cuda_stream = id(self)

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, stream: DeviceStream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        recorded = event or Event()
        recorded.record(self)
        return recorded


class Event:
    """A point in time; everything before it has been done by then."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        **kwargs: Any,
    ):
        self._timed = enable_timing
        self._at: float | None = None

    def record(self, stream: DeviceStream | None = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: DeviceStream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds. Raises RuntimeError for events that were not timed or not recorded."""
        if not (self._timed and end._timed) or self._at is None or end._at is None:
            raise RuntimeError(
                "Both events must be created with argument 'enable_timing=True' and recorded"
            )
        return (end._at - self._at) * 1000


class _Using:
    """`with torch.cuda.device(1):` or `with torch.cuda.stream(s):`"""

    def __init__(self, enter: Callable[[], Any], leave: Callable[[Any], None]):
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._before = self._enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._leave(self._before)


def torch_cuda() -> Answers:
    return _which() | _properties() | _memory() | _random() | _streams() | torch_cuda_graphs()


def torch_accelerator() -> Answers:
    memory = _memory()
    return {
        "is_available": lambda: True,
        "device_count": lambda: active().count,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: active().current,
        "set_device_index": _set_device,
        "synchronize": _synchronize,
        "current_stream": _current_stream,
        **{
            name: memory[name]
            for name in ("memory_allocated", "max_memory_allocated", "empty_cache")
        },
    }


def torch_cuda_nvtx() -> Answers:
    """Markers for a profiler that does not exist."""
    return {"range_push": lambda msg: 0, "range_pop": lambda: 0, "mark": lambda msg: None}


def _which() -> Answers:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda do, **kwargs: do(),
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: active().count,
        "current_device": lambda: active().current,
        "set_device": _set_device,
        "device": _device,
        "synchronize": _synchronize,
    }


def _set_device(device: Any) -> None:
    active().current = active().index(device)


def _device(device: Any) -> _Using:
    def enter() -> int:
        before = active().current
        _set_device(device)
        return before

    return _Using(enter, _set_device)


def _synchronize(device: Any = None) -> None:
    active().index(device)


def _properties() -> Answers:
    return {
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: active().capability,
        "get_device_properties": _device_properties,
        "is_bf16_supported": lambda including_emulation=True: active().capability >= (8, 0),
        "get_arch_list": list,
    }


def _device_properties(device: Any = None) -> SimpleNamespace:
    major, minor = active().capability
    return SimpleNamespace(
        name=NAME,
        major=major,
        minor=minor,
        total_memory=active().memory[active().index(device)].total,
        multi_processor_count=PROCESSORS,
        is_integrated=0,
        is_multi_gpu_board=0,
    )


def _memory() -> Answers:
    def of(device: Any) -> Any:
        return active().memory[active().index(device)]

    def free_and_total(device: Any = None) -> tuple[int, int]:
        return of(device).total - of(device).allocated, of(device).total

    def stats(device: Any = None) -> dict[str, int]:
        numbers = {"current": of(device).allocated, "peak": of(device).peak}
        return {
            f"{kind}_bytes.all.{name}": n
            for kind in ("allocated", "reserved")
            for name, n in numbers.items()
        } | {
            "allocation.all.allocated": of(device).allocations,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    return {
        "memory_allocated": lambda device=None: of(device).allocated,
        "max_memory_allocated": lambda device=None: of(device).peak,
        "memory_reserved": lambda device=None: of(device).allocated,
        "max_memory_reserved": lambda device=None: of(device).peak,
        "reset_peak_memory_stats": lambda device=None: of(device).reset_peak(),
        "reset_max_memory_allocated": lambda device=None: of(device).reset_peak(),
        "memory_stats": stats,
        "mem_get_info": free_and_total,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }


def _random() -> Answers:
    def stream(device: Any = None) -> torch.Generator:
        return active().generators[active().index(device)]

    def set_all(states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(active().generators, states, strict=True):
            generator.set_state(state)

    def seed_all(seed: int) -> None:
        for generator in active().generators:
            generator.manual_seed(seed)

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        stream(device).set_state(state)

    def seed_one(seed: int) -> None:
        stream().manual_seed(seed)

    def draw_seed() -> int:
        return stream().seed()

    return {
        "get_rng_state": lambda device=None: stream(device).get_state(),
        "set_rng_state": set_state,
        "get_rng_state_all": lambda: [generator.get_state() for generator in active().generators],
        "set_rng_state_all": set_all,
        "manual_seed": seed_one,
        "manual_seed_all": seed_all,
        "initial_seed": lambda: stream().initial_seed(),
        "seed": draw_seed,
        "seed_all": lambda: seed_all(draw_seed()),
        "default_generators": active().generators,
    }


def _streams() -> Answers:
    return {
        "Stream": DeviceStream,
        "ExternalStream": DeviceStream,
        "Event": Event,
        "current_stream": _current_stream,
        "default_stream": lambda device=None: DeviceStream(device),
        "set_stream": _set_stream,
        "stream": _stream,
    }


def _current_stream(device: Any = None) -> Any:
    index = active().index(device)
    while len(active().streams) <= index:
        active().streams.append(DeviceStream(len(active().streams)))
    return active().streams[index]


def _set_stream(stream: DeviceStream | None) -> None:
    if stream is not None:
        _current_stream(stream.device)
        active().streams[stream.device_index] = stream


def _stream(stream: DeviceStream | None) -> _Using:
    def enter() -> Any:
        before = _current_stream(stream.device if stream is not None else None)
        _set_stream(stream)
        return before

    return _Using(enter, _set_stream)
