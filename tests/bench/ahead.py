"""How long a step takes when generation may run ahead, with components that sleep.

    python tests/bench/ahead.py [--staleness 0 1 4] [--unit 0.1] [--steps 24] [--json]

Two real ranks: one generates, the other scores and trains. Generation takes 4 units of time, the
actor's training 2, scores, values and the critic's training 1 each. The least is the work of the
busier rank. `seconds a step` is the median of the later half of a run, `staleness` the mean over
all samples. The exit code is 1 if a figure is above its limit: the ratio of a step to the least has
a limit, and no sample may be older than `train.max_staleness`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "e2e"))

from toy_project import RECIPE, make_project  # noqa: E402

UNITS = {"gen": 4, "score": 1, "value": 1, "train_actor": 2, "train_critic": 1}
"""The calls of the critic share an interface and therefore a duration."""
LEAST = max(UNITS["gen"], sum(UNITS.values()) - UNITS["gen"])
AHEAD, IN_TURN = 1.25, 1.25 * sum(UNITS.values()) / LEAST
"""Limits of the seconds of a step over the least: where generation runs ahead,
and where all calls take turns."""


def settings(staleness: int, unit: float, steps: int) -> tuple[str, ...]:
    kinds = {name: "toy_reward" if name == "score" else "toy" for name in UNITS}
    sleeps = (
        f"graph.{name}.interface={{type: {kinds[name]}, args: {{seconds: {unit * units}}}}}"
        for name, units in UNITS.items()
    )
    return (
        "launch=local",
        "cluster.devices_per_node=2",
        "models.actor.devices='0'",
        "models.critic.devices='0'",
        "models.reward.devices='0'",
        "models.actor.rollout={backend: toy, devices: '1'}",
        f"train.steps={steps}",
        "train.eval.dataset=null",
        f"train.max_staleness={staleness}",
        *sleeps,
    )


def measure(staleness: int, unit: float, steps: int) -> dict[str, Any]:
    folder = f"run-{staleness}"
    arguments = [
        "train",
        "toy.yaml",
        *settings(staleness, unit, steps),
        "--run-dir",
        folder,
        "--quiet",
    ]
    subprocess.run(
        [sys.executable, "-m", "rlcli", *arguments], check=True, stdout=subprocess.DEVNULL
    )
    records = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    lags = [
        line["step"] - 1 - version
        for line in map(json.loads, Path(folder, "ledger.jsonl").read_text().splitlines())
        for version in line["versions"].values()
    ]
    took = statistics.median(record["time/step"] for record in records[steps // 2 : -1])
    of_least, mean = took / (LEAST * unit), statistics.fmean(lags)
    return {"max_staleness": staleness, "seconds": took, "of_least": of_least, "staleness": mean}


def above(figures: dict[str, Any]) -> list[str]:
    """The figures of a run that are above their limits."""
    label, limit = (
        f"max_staleness {figures['max_staleness']}",
        AHEAD if figures["max_staleness"] else IN_TURN,
    )
    problems = []
    if figures["of_least"] > limit:
        problems.append(f"{label}: {figures['of_least']:.2g} times the least, {limit:.3g} allowed")
    if figures["staleness"] > figures["max_staleness"]:
        problems.append(f"{label}: samples are {figures['staleness']:.2g} steps old")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--unit", type=float, default=0.1, help="seconds")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as home:
        project = make_project(Path(home))
        (project / "toy.yaml").write_text(RECIPE)
        os.environ |= {
            "RLCLI_PROJECT": home,
            "PYTHONPATH": str(TESTS.parent),
            "OMP_NUM_THREADS": "1",
        }
        os.chdir(home)
        runs = [measure(staleness, options.unit, options.steps) for staleness in options.staleness]
        os.chdir("/")
    wrong = [line for run in runs for line in above(run)]
    if options.json:
        print(json.dumps({"runs": runs, "above": wrong}))
        return 1 if wrong else 0
    print(f"{'max_staleness':>13} {'seconds a step':>15} {'of the least':>13} {'staleness':>10}")
    for run in runs:
        print(
            f"{run['max_staleness']:>13} {run['seconds']:>15.2f} {run['of_least']:>13.2f} "
            f"{run['staleness']:>10.2f}"
        )
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
