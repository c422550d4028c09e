"""Folders of runs, as runs leave them behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.api.timing import WAIT, TimeSpan
from rlcli.observe.metrics import MetricsWriter
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.samples import SampleRecord, SampleWriter
from rlcli.observe.trace import MASTER, STEP, STEPS, Traced, TraceFile


def record_run(
    folder: Path,
    *,
    steps: int = 4,
    seed: int = 1,
    kl_ctl: float = 0.1,
    metrics: Callable[[int], Mapping[str, float]] = lambda step: {"actor/reward": step / 10},
    samples: Sequence[SampleRecord] = (),
) -> Path:
    """A finished run of `ppo_math`, with what `metrics` gives for each step."""
    command = ["/home/me/rlcli", "train", "ppo_math", f"ppo.kl_ctl={kl_ctl}"]
    with RunDirectory.create(folder, "ppo_math", command=command) as run:
        with MetricsWriter(run.metrics) as writer:
            for step in range(1, steps + 1):
                writer.write(step, {**metrics(step), "time/step": 2.0})
        with SampleWriter(run.samples) as writer:
            for sample in samples:
                writer.write(sample)
        run.write_text("recipe/overrides.txt", f"ppo.kl_ctl={kl_ctl}\nseed={seed}\n")
        recipe = f"name: ppo_math\nseed: {seed}\nppo:\n  kl_ctl: {kl_ctl}\n"
        run.write_text("recipe.resolved.yaml", recipe)
        origins = {"ppo.kl_ctl": "/home/me/recipes/ppo_math.yaml:3:11", "seed": "command line"}
        run.write_text("origins.json", json.dumps(origins))
        run.write_status("done", steps, steps, 0)
    return folder


def answered(step: int, response: str, **fields: Any) -> SampleRecord:
    """A sample of a training step."""
    return SampleRecord(
        **{"step": step, "id": "row 1", "prompt": "1+1=", "response": response, **fields}
    )


CALLS = (
    ("gen", "generate", 0, 0, 5),
    ("ref", "inference", 1, 5, 7),
    ("train", "train_step", 0, 7, 9.8),
)
"""Name, kind and rank; when a call begins and ends in its step."""
WAITS = (("gen", 1, 0, 5), ("ref", 0, 5, 7), ("train", 1, 7, 9.8))


def record_timeline(folder: Path, steps: int = 3) -> None:
    """The timeline of a run on two ranks: rank 1 waits for generation, rank 0 for the reference."""
    file = TraceFile(folder, steps)
    for number in range(1, steps + 1):
        file.add(number, _recorded_step(number, 10.0 * number))
    file.write()


def _recorded_step(number: int, at: float) -> Iterator[Traced]:
    yield Traced(MASTER, TimeSpan(f"step {number}", STEP, at, at + 10, STEPS))
    for name, kind, rank, began, ended in CALLS:
        yield Traced(rank, TimeSpan(name, kind, at + began, at + ended, "calls"), f"step {number}")
    for name, rank, began, ended in WAITS:
        span = TimeSpan(f"waits for {name}", WAIT, at + began, at + ended, "calls")
        yield Traced(rank, span, cause=name)
