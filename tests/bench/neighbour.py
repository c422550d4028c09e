"""How much another torch process on the same cores slows down the training of `make train`;
measures, installs nothing.

    python tests/bench/neighbour.py [--rounds 3] [--steps 12] [--limit 3] [--default]

Each round trains alone and next to a process that multiplies matrices on all cores without end,
with threads that sleep while they wait (as rlcli sets them), with --default also with threads that
spin for a while (OpenMP's default). The rounds alternate, so that a machine that slows down slows
all alike. A step's time is the median of a run without its first step. Exit code 1 if the neighbour
costs more than `--limit` times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NEIGHBOUR = """
import torch
print("busy", flush=True)
a = torch.randn(512, 512)
while True:
    a = torch.tanh(a @ a)
"""
OVERRIDES = (
    "models.actor.path=null",
    (
        "models.actor.scratch={model_type: llama, hidden_size: 128, intermediate_size: 512, "
        "num_hidden_layers: 4, num_attention_heads: 4, max_position_embeddings: 512, "
        "tie_word_embeddings: true}"
    ),
    "models.actor.tokenizer=builtin:arithmetic",
    "train.eval={dataset: null}",
    "checkpoint={every_seconds: null, at_end: false, save: false}",
    "log={plot: false, trackers: []}",
)
"""The model and the steps of ppo_math, without the warm start, the evaluations and the saving."""


def seconds_per_step(steps: int, **variables: str) -> float:
    """Of the main job of `make train`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    with tempfile.TemporaryDirectory() as home:
        command = [
            sys.executable,
            "-m",
            "rlcli",
            "train",
            "ppo_math",
            *OVERRIDES,
            f"train.steps={steps}",
        ]
        subprocess.run(
            [*command, "--run-dir", f"{home}/run", "--quiet"],
            cwd=home,
            check=True,
            stdout=subprocess.DEVNULL,
            env={**inherited, "PYTHONPATH": str(REPOSITORY), **variables},
        )
        records = [
            json.loads(line) for line in Path(home, "run/metrics.jsonl").read_text().splitlines()
        ]
    return statistics.median(record["time/step"] for record in records[1:])


@contextlib.contextmanager
def neighbour() -> Iterator[None]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    process = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE, env=inherited
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=float, default=3.0)
    parser.add_argument(
        "--default", action="store_true", help="measure OpenMP's default too; it may take minutes"
    )
    options = parser.parse_args()
    settings: dict[str, dict[str, str]] = {"as rlcli sets them": {}}
    # rlcli keeps variables that are set; this value is invalid, so OpenMP uses its default
    if options.default:
        settings["OpenMP's default"] = {"OMP_WAIT_POLICY": "undefined"}
    times: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, variables in settings.items():
            times.setdefault(f"alone, {name}", []).append(
                seconds_per_step(options.steps, **variables)
            )
            with neighbour():
                times.setdefault(f"neighbour, {name}", []).append(
                    seconds_per_step(options.steps, **variables)
                )
        for name, seconds in times.items():
            shown = " ".join(f"{value:.3f}" for value in seconds)
            print(f"{name:<32} {statistics.median(seconds):7.3f} s/step   ({shown})", flush=True)
    ratio = statistics.median(times["neighbour, as rlcli sets them"]) / statistics.median(
        times["alone, as rlcli sets them"]
    )
    print(f"next to a neighbour: {ratio:.2f} times as long (limit {options.limit:g})")
    return int(ratio > options.limit)


if __name__ == "__main__":
    sys.exit(main())
