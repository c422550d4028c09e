"""What runs learn: under every engine and in every layout, or by every algorithm. One table.

    python tests/bench/learning.py sft [--json]
    python tests/bench/learning.py ppo [--steps 10] [--model FOLDER] [--json]
    python tests/bench/learning.py flows [--steps 10] [--model FOLDER] [--json]
    python tests/bench/learning.py servers [--steps 20] [--model FOLDER] [--only vllm] [--json]
    python tests/bench/learning.py algorithms [--seeds 3] [--only grpo --only rloo]
                                              [--keep FOLDER] [--json]

Each row of `sft` and `ppo` is a run of `rlcli train`, with as many ranks as its layout has. SFT
begins with random weights; the rows must have the losses of the first to within 1e-4, else the exit
code is 1. PPO answers a held-out set before, during and after training; without `--model`, the
result of the warm start `sft_math` (about two minutes), all rows begin with that. megatron needs a
GPU: its ranks get a pretend device that computes in host memory.

The rows of `flows` are PPO too, with the decoupled loss: generation in process, or by a rollout on
a rank of its own that follows an actor of one engine or another and runs up to `max_staleness`
steps ahead. Each has the accuracy before, during and after training, how stale samples were and how
far sampler and trainer were apart (means over the steps and the largest), and the median seconds
that an update of the rollout and a step took.

The rows of `servers` are PPO and GRPO, each with generation in process and with a real server of
each kind, on the CPU (`make test-servers` makes their environments). A row whose last accuracy is
more than 0.03 below that of generation in process has the exit code 1.

Each row of `algorithms` is a shipped recipe, as it is, under several seeds: the accuracy on 256
held-out problems before and after. All seeds of all algorithms begin with one warm start, those of
`grpo_moe`, whose model is a mixture of experts, with another. With
`--keep` the runs stay in that folder, and those that are there and finished are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HOME / "tests" / "servers"))
from cpu_servers import backend_arguments  # noqa: E402 - a neighbouring folder of scripts

PRETEND_RANKS = HOME / "tests" / "backends" / "pretend_ranks"
TINY = (
    "{_replace_: true, model_type: qwen3, hidden_size: 64, intermediate_size: 128, "
    "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, "
    "max_position_embeddings: 128, tie_word_embeddings: true}"
)
QUIET = (
    "log.trackers=[]",
    "log.plot=false",
    "checkpoint.at_end=false",
    "checkpoint.every_seconds=null",
)
SFT = (
    f"models.actor.scratch={TINY}",
    "train.steps=12",
    "datasets.train.args.problems=256",
    "models.actor.backend.args.eps=1e-3",
    "models.actor.backend.args.warmup_steps=4",
)
WITHIN = 1e-4
LONGEST = 256
"""Tokens of a prompt and its response in `servers`."""
SERVERS = {
    "sglang": {"context_length": LONGEST, "max_total_tokens": 32 * LONGEST},
    "vllm": {"max_model_len": LONGEST},
}
BELOW = 0.03
"""How much less accurate than with generation in process a run with a server may end."""


@dataclass(frozen=True)
class Layout:
    """The engine of the trained roles, and their mesh."""

    backend: str
    degrees: dict[str, int] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        args = " ".join(f"{name}={value}" for name, value in self.args.items())
        where = " x ".join(f"{name}{degree}" for name, degree in self.degrees.items()) or "1 rank"
        return f"{self.backend} {args}".strip() + f", {where}"

    def changes(self, roles: tuple[str, ...], other_ranks: int = 0) -> Iterator[str]:
        """Overrides of a recipe, with ranks for other roles after those of these."""
        ranks = prod(self.degrees.values())
        yield from ("launch=local", f"cluster.devices_per_node={ranks + other_ranks}")
        yield f"cluster.device={'cuda' if self.backend == 'megatron' else 'cpu'}"
        for role in roles:
            yield f"models.{role}.backend.type={self.backend}"
            yield from (
                f"models.{role}.backend.args.{name}={value}" for name, value in self.args.items()
            )
            degrees = ", ".join(f"{name}: {degree}" for name, degree in self.degrees.items())
            yield f"models.{role}.mesh={{{degrees}}}"


OF_SFT = (
    Layout("fsdp"),
    Layout("fsdp", {"dp": 2}),
    Layout("fsdp", {"tp": 2}),
    Layout("deepspeed", {}, {"zero_stage": 1}),
    Layout("deepspeed", {"dp": 2}, {"zero_stage": 1}),
    Layout("deepspeed", {"dp": 2}, {"zero_stage": 3}),
    Layout("megatron"),
    Layout("megatron", {"dp": 2}),
    Layout("megatron", {"tp": 2}),
    Layout("megatron", {"pp": 2}),
)
OF_PPO = (Layout("fsdp"), Layout("fsdp", {"dp": 2}), Layout("fsdp", {"tp": 2}))


@dataclass(frozen=True)
class Flow:
    """Which role generates, how far ahead of training at most,
    and the engine of the trained roles."""

    max_staleness: int = 0
    trained: Layout = Layout("fsdp")
    rollout: bool = True

    @property
    def title(self) -> str:
        who = (
            f"{self.trained.backend}, rollout"
            if self.rollout
            else f"{self.trained.backend}, in process"
        )
        return f"{who}, staleness {self.max_staleness}"

    def changes(self, roles: tuple[str, ...]) -> Iterator[str]:
        """Overrides of a recipe with the profile async."""
        yield from self.trained.changes(roles, int(self.rollout))
        yield f"train.max_staleness={self.max_staleness}"
        if self.rollout:
            yield f"models.actor.rollout.devices={prod(self.trained.degrees.values())}"
            yield "models.actor.rollout.backend.args.dtype=float32"
        else:
            yield "models.actor.rollout=null"


OF_FLOWS = (
    Flow(rollout=False),
    Flow(),
    Flow(1),
    Flow(4),
    Flow(1, Layout("megatron")),
    Flow(1, Layout("deepspeed", {}, {"zero_stage": 3})),
)
ALGORITHMS = {
    "ppo": ("ppo_math",),
    "grpo": ("grpo_math",),
    "grpo_moe": ("grpo_math_moe",),
    "rloo": ("grpo_math", "--with", "rloo"),
    "dpo": ("dpo_arithmetic",),
    "kto": ("kto_arithmetic",),
    "best_of_n": ("best_of_n_math",),
    "distill": ("distill_math",),
}


def train(arguments: Iterable[str], folder: Path, pretend_ranks: bool = False) -> list[Any]:
    """The lines of metrics.jsonl. Results that recipes start from are made, and found again, in the
    folder around it. A run that is there and finished is not run again. Raises CalledProcessError
    if the run fails."""
    path = [str(HOME), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if pretend_ranks:
        path.insert(0, str(PRETEND_RANKS))
    command = [sys.executable, "-m", "rlcli", "train", *arguments, "--run-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    status = folder / "status.json"
    if not status.is_file() or json.loads(status.read_text())["state"] != "done":
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(
            command, env=environment, cwd=folder.parent, stdout=subprocess.DEVNULL, check=True
        )
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(
    recipe: str, layout: Layout, roles: tuple[str, ...], changes: tuple[str, ...], folder: Path
) -> list[Any]:
    """The lines of metrics.jsonl of a recipe in a layout."""
    return train(
        [recipe, *QUIET, *changes, *layout.changes(roles)], folder, layout.backend == "megatron"
    )


def sft_rows(folder: Path) -> Iterator[tuple[dict[str, Any], bool]]:
    """Rows of the table, and whether each is within the tolerance."""
    first: list[float] = []
    for number, layout in enumerate(OF_SFT):
        lines = run("sft_math", layout, ("actor",), SFT, folder / str(number))
        losses = [line["actor/loss"] for line in lines if "actor/loss" in line]
        first = first or losses
        apart = max(abs(one / wanted - 1) for one, wanted in zip(losses, first, strict=True))
        shown = {f"step {step}": losses[step - 1] for step in (1, 4, 8, 12)}
        yield {"engine": layout.title, **shown, "largest difference": apart}, apart <= WITHIN


def ppo_rows(folder: Path, steps: int, model: str | None) -> Iterator[tuple[dict[str, Any], bool]]:
    for number, layout in enumerate(OF_PPO):
        lines = run(
            "ppo_math",
            layout,
            ("actor", "critic"),
            tuple(length_overrides(steps, model)),
            folder / str(number),
        )
        yield (
            {"engine": layout.title, **accuracies(lines), "s per step": median(lines, "time/step")},
            True,
        )


def flow_rows(folder: Path, steps: int, model: str | None) -> Iterator[tuple[dict[str, Any], bool]]:
    for number, flow in enumerate(OF_FLOWS):
        changes = (*length_overrides(steps, model), *flow.changes(("actor", "critic")))
        arguments = ["ppo_math", "--with", "async", *QUIET, *changes]
        lines = train(arguments, folder / str(number), flow.trained.backend == "megatron")
        shown = accuracies(lines)
        for column, name in (
            ("staleness", "actor_rollout/staleness"),
            ("drift", "actor/policy_drift"),
        ):
            values = [line[name] for line in lines if name in line]
            shown[f"{column}, mean"] = sum(values) / max(1, len(values))
            shown[f"{column}, most"] = max(values, default=0.0)
        shown["s per update"] = median(lines, "time/actor_train.copy_to")
        yield {"flow": flow.title, **shown, "s per step": median(lines, "time/step")}, True


def server_rows(
    folder: Path, steps: int, model: str | None, only: Sequence[str]
) -> Iterator[tuple[dict[str, Any], bool]]:
    for recipe in ("ppo_math", "grpo_math"):
        in_process = None
        for backend in ("in process", *(only or SERVERS)):
            changes = [*QUIET, *length_overrides(steps, model), *server_changes(backend)]
            lines = train([recipe, *changes], folder / f"{recipe} {backend}")
            shown = accuracies(lines)
            last = list(shown.values())[-1]
            in_process = last if in_process is None else in_process
            seconds = {"s per step": median(lines, "time/step")}
            yield {"run": f"{recipe}, {backend}", **shown, **seconds}, last >= in_process - BELOW


def server_changes(backend: str) -> Iterator[str]:
    """Overrides of a recipe whose actor has a rollout with a server of this kind, if any."""
    if backend in SERVERS:
        arguments = backend_arguments(backend, **SERVERS[backend])
        described = json.dumps({"type": backend, "args": arguments})
        yield f"models.actor.rollout={{backend: {described}}}"


def length_overrides(steps: int, model: str | None) -> Iterator[str]:
    """Overrides: how long, and with which actor to begin."""
    yield from (f"train.steps={steps}", f"train.eval.every_steps={max(1, steps // 2)}")
    if model:
        yield f"models.actor.path={Path(model).resolve()}"


def accuracies(lines: Iterable[Any]) -> dict[str, float]:
    return {
        f"step {line['step']}": line["eval/accuracy"] for line in lines if "eval/accuracy" in line
    }


def median(lines: Iterable[Any], name: str) -> float:
    values = sorted(line[name] for line in lines if name in line)
    return values[len(values) // 2] if values else 0.0


def algorithm_rows(
    folder: Path, names: Sequence[str], seeds: int
) -> Iterator[tuple[dict[str, Any], bool]]:
    for name in names:
        before, after = [], []
        for seed in range(1, seeds + 1):
            lines = train([*ALGORITHMS[name], *QUIET, f"seed={seed}"], folder / f"{name}{seed}")
            accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
            before.append(accuracy[0])
            after.append(accuracy[-1])
        shown = {f"seed {seed}": accuracy for seed, accuracy in enumerate(after, start=1)}
        yield {"algorithm": name, "before": before[0], **shown, "mean": sum(after) / seeds}, True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["sft", "ppo", "flows", "servers", "algorithms"])
    parser.add_argument("--steps", type=int, default=10, help="of PPO")
    parser.add_argument("--model", help="folder of the model that PPO begins with")
    parser.add_argument("--seeds", type=int, default=3, help="of each algorithm")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=[*ALGORITHMS, *SERVERS],
        help="an algorithm or a kind of server; may be repeated",
    )
    parser.add_argument("--keep", help="folder of the runs of algorithms")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.keep and options.what != "algorithms":
        parser.error("--keep is for algorithms: their runs have no other settings than a seed")
    rows, good = [], True
    with tempfile.TemporaryDirectory() as home:
        folder = Path(options.keep or home).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        tables = {
            "sft": lambda: sft_rows(folder),
            "ppo": lambda: ppo_rows(folder, options.steps, options.model),
            "flows": lambda: flow_rows(folder, options.steps, options.model),
            "servers": lambda: server_rows(folder, options.steps, options.model, options.only),
            "algorithms": lambda: algorithm_rows(
                folder, options.only or list(ALGORITHMS), options.seeds
            ),
        }
        for row, is_good in tables[options.what]():
            if not rows and not options.json:
                print(
                    "".join(
                        f"{name:>20}" if number else f"{name:32}" for number, name in enumerate(row)
                    )
                )
            rows.append(row)
            good = good and is_good
            if not options.json:
                print(
                    "".join(
                        f"{one:20.6g}" if isinstance(one, float) else f"{one:32}"
                        for one in row.values()
                    ),
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=2))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
