"""Folders of runs, as runs leave them behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.observe.metrics import MetricsWriter
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.samples import SampleRecord, SampleWriter


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
