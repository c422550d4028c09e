"""What calls compute, and how fast the device of a rank could: tokens, operations, traces."""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.dataflow import MFCDef, ModelInterfaceType
from rlcli.api.key_meaning import PROMPTS, SEQUENCES
from rlcli.api.model import Model
from rlcli.api.timing import apart
from rlcli.files import make_folder, replace_file
from rlcli.messaging.messages import Fields
from rlcli.observe.profile import trace_file
from rlcli.observe.trace import event_line
from rlcli.ops.product_rate import measured_rate
from rlcli.recipe.graph import train_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.call_outputs import output_names

MOST_EVENTS = 50_000
"""Of a call: the longest ones."""
MOST_BYTES = 64 << 20
"""Of a trace. Calls beyond it are in the trace as single events."""
DAY = 86_400 * 10**9
"""Nanoseconds. Times of a trace count from midnight (UTC): viewers cannot tell apart the
microseconds of a number that counts from 1970."""

PROFILER = "profiler"
"""Kind of a span: what is done for a profile alone."""
_PROFILING = threading.Lock()
"""Held while a call is traced: torch has one profiler for a process."""


def work_of(mfc: MFCDef, data: SequenceSample, described: Fields | None, model: Model) -> Fields:
    """What a rank's call on `data` had to do; `described`: its output. Counting starts anew.

    `tokens`: of the sequences that it scored or trained on, or of the responses that it generated.
    `operations`: floating-point operations of this rank; 0 if they are not known.
    """
    count = getattr(model.module, "operations", None)
    computed = count.drain() if count is not None else 0.0
    if mfc.interface_type is ModelInterfaceType.GENERATE:
        responses = _responses(mfc, data, described)
        computed += count.generated(responses) if count is not None else 0.0
        return {"tokens": sum(sum(lengths) for _, lengths in responses), "operations": computed}
    is_idle = model.module is None or (count is not None and not computed)
    has_tokens = SEQUENCES in data.keys and not is_idle
    tokens = sum(data.flat_seqlens(SEQUENCES)) if has_tokens else 0
    return {"tokens": tokens, "operations": computed}


def _responses(
    mfc: MFCDef, data: SequenceSample, described: Fields | None
) -> list[tuple[int, list[int]]]:
    """For each prompt its length and those of its responses."""
    name = output_names(mfc).get(SEQUENCES)
    if described is None or name is None or PROMPTS not in data.keys:
        return []
    prompts = [sum(lengths) for lengths in data.seqlens[PROMPTS]]
    sequences = SequenceSample.from_json(described).seqlens[name]
    return [
        (prompt, [length - prompt for length in group])
        for prompt, group in zip(prompts, sequences, strict=False)
    ]


class CallPerformance:
    """Watches the calls of a rank."""

    def __init__(self, recipe: Recipe, rank: int, device: torch.device, run_dir: Path | None):
        calls = [mfc.name for mfc in train_graph(recipe)]
        self._traces = CallTraces(recipe.log.profiled_steps, calls, rank, run_dir)
        self._rate = DeviceRate(device, recipe.log.peak_tflops)

    @contextmanager
    def watching(self, call: str, step: int, engine: Any) -> Iterator[None]:
        """Trace a call of a step, counted from 1, if this step is profiled."""
        if self._traces.includes(call, step):
            with apart("measuring the device", PROFILER):
                self._rate.measure(engine)
        with self._traces.of(call, step):
            yield

    def rate(self, engine: Any) -> float:
        """Operations per second that the device reaches in the dtype of an engine; 0 if that was
        neither stated nor measured."""
        return self._rate.of(engine)


class DeviceRate:
    """The operations per second that this rank's device reaches."""

    def __init__(self, device: torch.device, stated: float | None):
        """`stated`: in TFLOP/s; None: it is measured."""
        self._device = device
        self._stated = stated * 1e12 if stated is not None else None
        self._measured: dict[str, float] = {}

    def measure(self, engine: Any) -> None:
        """Measure it, in the dtype of an engine's products, unless it is known."""
        count = getattr(engine, "operations", None)
        if count is not None and self._stated is None and count.dtype not in self._measured:
            dtype = getattr(torch, count.dtype)
            self._measured[count.dtype] = measured_rate(dtype, self._device)

    def of(self, engine: Any) -> float:
        count = getattr(engine, "operations", None)
        if count is None:
            return 0.0
        return self._stated or self._measured.get(count.dtype, 0.0)


class CallTraces:
    """Traces of the calls of some steps, by torch's profiler."""

    def __init__(
        self, steps: Collection[int], calls: Collection[str], rank: int, run_dir: Path | None
    ):
        """`steps`: counted from 1."""
        self._steps = steps if run_dir is not None else ()
        self._calls, self._rank, self._run_dir = calls, rank, run_dir
        self._lines: dict[int, list[str]] = {}
        """Step → the events of its calls so far."""
        self._bytes = 0

    def includes(self, call: str, step: int) -> bool:
        return step in self._steps and call in self._calls

    @contextmanager
    def of(self, call: str, step: int) -> Iterator[None]:
        """Trace a call of a step, if it is to be traced, and no other thread traces one."""
        if not self.includes(call, step) or not _PROFILING.acquire(blocking=False):
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it prints when it starts and stops
        try:
            profiler = torch.profiler.profile()
            with apart("starting the profiler", PROFILER):
                profiler.start()
            began = time.time_ns()
            try:
                yield
            finally:
                with apart("stopping the profiler", PROFILER):
                    profiler.stop()
            with apart("writing the profile", PROFILER):
                results: Any = profiler.profiler
                self._add(call, step, began, results.kineto_results.events())
        finally:
            _PROFILING.release()

    def _add(self, call: str, step: int, began: int, events: list[Any]) -> None:
        if step not in self._lines:
            self._lines = {step: []}  # the steps before it are written
            self._bytes = 0
        lines = _longest(events, self._rank)
        if self._bytes + sum(map(len, lines)) > MOST_BYTES:
            lines = []
        lines.append(_event(call, "call", began, time.time_ns() - began, f"rank {self._rank}", 0))
        self._lines[step] += lines
        self._bytes += sum(map(len, lines))
        assert self._run_dir is not None
        file = trace_file(self._run_dir, step, self._rank)
        make_folder(file.parent)
        text = ",\n".join(self._lines[step])
        replace_file(file, f'{{"traceEvents":[\n{text}\n]}}\n'.encode())


def _longest(events: list[Any], rank: int) -> list[str]:
    visible = (event for event in events if not event.is_hidden_event())
    longest = heapq.nlargest(MOST_EVENTS, visible, key=lambda event: event.duration_ns())
    return [_line(event, rank) for event in longest]


def _line(event: Any, rank: int) -> str:
    on_device = event.device_type().name != "CPU"
    process = f"rank {rank} cuda:{event.device_index()}" if on_device else f"rank {rank}"
    thread = event.device_resource_id() if on_device else event.start_thread_id()
    kind = "kernel" if on_device else "cpu_op"
    return _event(event.name(), kind, event.start_ns(), event.duration_ns(), process, thread)


def _event(name: str, kind: str, began: int, duration: int, process: str, thread: int) -> str:
    """An event of the trace; times in nanoseconds."""
    return event_line(name, kind, began % DAY / 1e9, duration / 1e9, pid=process, tid=thread)
