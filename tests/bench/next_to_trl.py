"""GRPO next to TRL's, on a real chat model: are the updates the same, and is as much learned.
Needs `trl`.

    python tests/bench/next_to_trl.py --model FOLDER [--only updates|learning] [--seeds 3]
                                      [--steps 20] [--json]

The task is a sum of two numbers up to 12, asked in the model's chat format; the reward is 1 if the
last number of the response is the sum, and a quarter if it ends with another number. Of the 144
questions 64 are held out. Everything is in float32, with the same AdamW, clip and temperature,
without a KL penalty, and one update per batch.

`updates`: five batches of recorded responses to both, whose log-probs of the old policy are those
before the first update, so the ratios of later ones differ from 1. The losses and the gradients of
each must agree to 1e-4: losses absolutely, gradients by the norm of the difference, relative to
that of the gradient. Both divide by a group's standard deviation plus the constant that TRL adds
(1e-4; ours is smaller).

`learning`: each side samples its own responses to the same prompts in the same order. All models
are examined by our engine, greedily, on the held-out questions. The mean area under our curves,
over the seeds, must be at least that of TRL's less the standard error of TRL's mean. Exit code 1 if
one of the two does not hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

from chat_sums import PROMPTS, Row, Task, examine, our_curve, our_updates, role, rollout
from trl_grpo import their_curve, their_updates

from rlcli.ops import advantages

WITHIN = 1e-4
UPDATES = 5
SCALE_EPS_OF_TRL = 1e-4


def curve_area(curve: dict[int, float]) -> float:
    """Mean height, by trapezoids."""
    points = sorted(curve.items())
    pieces = [(b - a) * (low + high) / 2 for (a, low), (b, high) in pairwise(points)]
    return sum(pieces) / (points[-1][0] - points[0][0])


def updates(task: Task) -> Iterator[tuple[Row, bool]]:
    """Rows of a table, and whether each is within the tolerance."""
    rows, sampler = task.order(0, UPDATES), role(task, task.weights, backend="inference")
    parts = [rows[start : start + PROMPTS] for start in range(0, len(rows), PROMPTS)]
    batches = [rollout(task, sampler, part, f"part{number}") for number, part in enumerate(parts)]
    recorded = [response for batch in batches for response in task.responses(batch)]
    ordinary, advantages.SCALE_EPS = advantages.SCALE_EPS, SCALE_EPS_OF_TRL
    expected = our_updates(task, batches)
    advantages.SCALE_EPS = ordinary
    for row in their_updates(task, rows, recorded, expected):
        yield (
            row,
            row["gradient"] > 0 and max(row["losses apart"], row["gradients apart"]) <= WITHIN,
        )


def learning(task: Task, seeds: int, steps: int) -> Iterator[tuple[Row, bool]]:
    every, areas = max(1, steps // 4), {"ours": [], "TRL": []}
    first = examine(task, role(task, task.weights, backend="inference"))
    for seed in range(1, seeds + 1):
        for side, curve_of in (("ours", our_curve), ("TRL", their_curve)):
            curve = {0: first, **curve_of(task, seed, steps, every)}
            areas[side].append(curve_area(curve))
            heights = {f"step {step}": height for step, height in curve.items()}
            yield {"side": side, "seed": seed, **heights, "area": areas[side][-1]}, True
    ours, theirs = (statistics.mean(areas[side]) for side in ("ours", "TRL"))
    error = statistics.stdev(areas["TRL"]) / seeds**0.5 if seeds > 1 else 0.0
    yield {"ours": ours, "TRL's": theirs, "standard error": error}, ours >= theirs - error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a chat model")
    parser.add_argument("--only", choices=["updates", "learning"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    task, good, rows = Task.of(options.model), True, []
    tables = {
        "updates": lambda: updates(task),
        "learning": lambda: learning(task, options.seeds, options.steps),
    }
    for name in [options.only] if options.only else tables:
        names: list[str] = []
        for row, is_good in tables[name]():
            rows.append(row)
            good = good and is_good
            if not options.json and list(row) != names:
                names = list(row)
                print("".join(f"{one:>16}" for one in names))
            if not options.json:
                print(
                    "".join(
                        f"{one:16.5g}" if isinstance(one, float) else f"{one:>16}"
                        for one in row.values()
                    ),
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=2))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
