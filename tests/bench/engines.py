"""How far every engine is from a plain loop, in every layout: one table.

    python tests/bench/engines.py [--backend fsdp] [--json]

The plain loop runs transformers' own forward pass in float64, one sequence at a time, and torch's
AdamW with a large eps (the first step of Adam divides noise by noise where a gradient is zero).
Ranks are real gloo processes with uneven shares. `loss` and `norm` are relative differences of the
first step, `update` is the relative error of what it does to the weights, `log-probs` the largest
difference. The exit code is 1 if one is above its limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlcli.api.config import MicroBatchSpec
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import answer_loss, answer_weight, batch
from rlcli.testing.backend.forward import scores
from rlcli.testing.backend.plain import AdamW, PlainTraining, plain_answer_loss, scores_of
from rlcli.testing.pretend_cuda import pretend_cuda
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_model

LIMITS = {"loss": 1e-6, "norm": 1e-5, "update": 1e-3, "log-probs": 1e-5}
OPTIMIZER = {
    "lr": 1e-2,
    "weight_decay": 0.1,
    "beta1": 0.8,
    "beta2": 0.9,
    "eps": 1.0,
    "max_grad_norm": 0.5,
}
MODEL = {"hidden_size": 64, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Layout:
    """An engine and the ranks that it is on."""

    backend: str
    degrees: dict[str, int]
    args: dict[str, Any]

    @property
    def title(self) -> str:
        args = " ".join(f"{name}={value}" for name, value in self.args.items())
        where = (
            " x ".join(f"{name}{degree}" for name, degree in self.degrees.items() if degree > 1)
            or "1 rank"
        )
        return f"{self.backend} {args}".strip() + f", {where}"


LAYOUTS = (
    Layout("fsdp", {}, {}),
    Layout("fsdp", {"dp": 2}, {}),
    Layout("fsdp", {"tp": 2}, {}),
    Layout("fsdp", {"dp": 2, "tp": 2}, {}),
    *(
        Layout("fsdp", degrees, {"context_parallel": method})
        for degrees in ({"cp": 2}, {"cp": 4}, {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2})
        for method in ("ulysses", "ring")
    ),
    Layout("megatron", {}, {}),
    Layout("megatron", {"tp": 2}, {}),
    Layout("megatron", {"pp": 2}, {}),
    Layout("megatron", {"tp": 2, "pp": 2}, {}),
    Layout("megatron", {"tp": 2, "dp": 2}, {}),
    Layout("deepspeed", {"dp": 2}, {"zero_stage": 1}),
    Layout("deepspeed", {"dp": 2}, {"zero_stage": 3}),
    Layout("inference", {}, {}),
    Layout("inference", {"cp": 2}, {}),
)


def measure(layout: Layout, folder: Path) -> dict[str, float]:
    """The largest difference of any rank, by figure."""
    contract = _contract(layout)
    size = prod(layout.degrees.values())

    def work(rank: int) -> dict[str, Any]:
        with contract.at_device():
            return look(rank)

    def look(rank: int) -> dict[str, Any]:
        mesh = mesh_of_ranks(**layout.degrees)
        engine = contract.engine(lm=tiny_model(**MODEL), mesh=mesh, **OPTIMIZER)
        share = batch().select_indices(_share(rank, layout))
        figures: dict[str, Any] = {"scores": scores(engine, share, "log-probs").tolist()}
        if contract.trains():
            stats = engine.train_batch(
                share, answer_loss, answer_weight, mb_spec=MicroBatchSpec(n_mbs=2)
            )
            weights = {name: weight.cpu().clone() for name, weight in engine.whole_parameters()}
            save_file(weights, str(folder / f"{rank}.safetensors"))
            figures |= {"loss": stats["loss"], "norm": stats["grad_norm"]}
        return figures

    results = [work(0)] if size == 1 else run_on_ranks(size, work, timeout=120)
    return _compared(layout, results, folder)


def _contract(layout: Layout) -> BackendContract:
    """A contract that runs backends for GPUs on a pretend device, which computes in host memory."""
    subject: Any = type(
        "Subject", (BackendContract,), {"name": layout.backend, "args": layout.args}
    )
    if "cpu" not in type(subject().backend()).DEVICES:
        subject.device, subject.at_device = "cuda:0", lambda self: pretend_cuda()
    return subject()


def _share(rank: int, layout: Layout) -> range:
    """Uneven: of two data-parallel ranks the first has most sequences."""
    dp = layout.degrees.get("dp", 1)
    if dp == 1:
        return range(batch().bs)
    replica = rank // (prod(layout.degrees.values()) // dp)
    return range(5) if replica == 0 else range(5, batch().bs)


def _compared(layout: Layout, results: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    plain = tiny_model(**MODEL).double()
    before = {name: weight.detach().clone() for name, weight in plain.named_parameters()}
    apart = {"log-probs": 0.0}
    for rank, result in enumerate(results):
        with torch.no_grad():
            expected = scores_of(plain, batch().select_indices(_share(rank, layout)))[0]
        apart["log-probs"] = max(
            apart["log-probs"], float((torch.tensor(result["scores"]) - expected).abs().max())
        )
    if "loss" not in results[0]:
        return apart
    training = PlainTraining(plain, AdamW(**OPTIMIZER))
    expected_step = training.step([batch()], plain_answer_loss, 1.0)
    moved = {name: weight - before[name] for name, weight in training.weights().items()}
    for rank, result in enumerate(results):
        weights = load_file(folder / f"{rank}.safetensors")
        errors = [
            (weights[name].double() - before[name] - move).norm() for name, move in moved.items()
        ]
        size = torch.stack([move.norm() for move in moved.values()]).norm()
        deviations = {
            "loss": abs(result["loss"] / expected_step["loss"] - 1),
            "norm": abs(result["norm"] / expected_step["grad_norm"] - 1),
            "update": float(torch.stack(errors).norm() / size),
        }
        apart |= {name: max(value, apart.get(name, 0.0)) for name, value in deviations.items()}
    return apart


def measured(layouts: tuple[Layout, ...]) -> Iterator[tuple[Layout, dict[str, float]]]:
    for layout in layouts:
        with tempfile.TemporaryDirectory() as folder:
            yield layout, measure(layout, Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", help="only this one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    layouts = tuple(layout for layout in LAYOUTS if options.backend in (None, layout.backend))
    if not options.json:
        print(f"{'':44}" + "".join(f"{name:>12}" for name in LIMITS))
    rows, failed = [], False
    for layout, apart in measured(layouts):
        over = [name for name, value in apart.items() if not value <= LIMITS[name]]
        failed = failed or bool(over)
        rows.append({"engine": layout.title} | apart)
        if not options.json:
            cells = (f"{apart[name]:12.1e}" if name in apart else f"{'-':>12}" for name in LIMITS)
            print(
                f"{layout.title:44}"
                + "".join(cells)
                + ("  above the limit: " + ", ".join(over) if over else "")
            )
    if options.json:
        print(json.dumps(rows, indent=2))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
