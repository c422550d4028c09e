"""How far every engine is from a plain loop, in every layout: one table.

    python tests/bench/engines.py [--backend fsdp] [--json]

The plain loop runs transformers' own forward pass in float64, one sequence at a time, and torch's
AdamW with a large eps (the first step of Adam divides noise by noise where a gradient is zero).
Ranks are real gloo processes with uneven shares. `loss` and `norm` are relative differences of the
first step, `updates` is the relative error of what five steps do to the weights; of log-probs,
entropies and values it is the largest difference. A layout with ep, which divides dp x cp, has
experts (mixtral), any other none (llama). The exit code is 1 if a figure is above its limit. A
layout that the engine cannot run is shown with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlcli import registry
from rlcli.api.config import MicroBatchSpec
from rlcli.api.layout import RoleLayout
from rlcli.recipe.mesh import DIMENSIONS, Mesh
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import answer_loss, answer_weight, batch
from rlcli.testing.backend.forward import scores
from rlcli.testing.backend.plain import (
    AdamW,
    PlainTraining,
    exact,
    logits_of,
    plain_answer_loss,
    scores_of,
)
from rlcli.testing.pretend_cuda import pretend_cuda
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_model

LIMITS = {
    "loss": 1e-6,
    "norm": 1e-5,
    "updates": 1e-4,
    "log-probs": 1e-5,
    "entropies": 1e-5,
    "values": 1e-5,
}
OPTIMIZER = {
    "lr": 1e-2,
    "weight_decay": 0.1,
    "beta1": 0.8,
    "beta2": 0.9,
    "eps": 1.0,
    "max_grad_norm": 0.5,
}
MODEL = {"hidden_size": 64, "num_hidden_layers": 4}
UPDATES = 5


@dataclass(frozen=True)
class Layout:
    """An engine and the ranks that it is on."""

    backend: str
    degrees: dict[str, int]
    args: dict[str, Any]
    family: str = "llama"

    @property
    def mesh(self) -> dict[str, int]:
        """Degrees of all dimensions."""
        return dict.fromkeys(DIMENSIONS, 1) | self.degrees

    @property
    def ranks(self) -> int:
        return Mesh(**self.mesh).size

    @property
    def refusal(self) -> str | None:
        """Why the engine cannot run it."""
        problems = registry.load_declared("backends", self.backend, "LAYOUT")
        if problems is None:
            return None
        layout = RoleLayout("actor", self.mesh, self.args, "auto")
        return next((problem.message for problem in problems(layout)), None)

    @property
    def title(self) -> str:
        args = " ".join(f"{name}={value}" for name, value in self.args.items())
        where = (
            " x ".join(f"{name}{degree}" for name, degree in self.degrees.items() if degree > 1)
            or "1 rank"
        )
        family = "" if self.family == "llama" else f", {self.family}"
        return f"{self.backend} {args}".strip() + f", {where}{family}"


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
    Layout("fsdp", {"dp": 2, "ep": 2}, {}, "mixtral"),
    Layout("fsdp", {"dp": 4, "ep": 2}, {}, "mixtral"),
    Layout("fsdp", {"cp": 2, "ep": 2}, {"context_parallel": "ulysses"}, "mixtral"),
    Layout("fsdp", {"dp": 2, "cp": 2, "ep": 2}, {"context_parallel": "ring"}, "mixtral"),
    Layout("megatron", {}, {}),
    Layout("megatron", {"tp": 2}, {}),
    Layout("megatron", {"pp": 2}, {}),
    Layout("megatron", {"tp": 2, "pp": 2}, {}),
    Layout("megatron", {"tp": 2, "dp": 2}, {}),
    Layout("megatron", {"cp": 2}, {"context_parallel": "ulysses"}),
    Layout("megatron", {"cp": 2, "dp": 2}, {"context_parallel": "ring"}),
    Layout("megatron", {"pp": 2}, {"virtual_stages": 2}),
    Layout("deepspeed", {"dp": 2}, {"zero_stage": 1}),
    Layout("deepspeed", {"dp": 2}, {"zero_stage": 3}),
    Layout("inference", {}, {}),
    Layout("inference", {"cp": 2}, {}),
    *(
        Layout("megatron", degrees, {}, "mixtral")
        for degrees in (
            {},
            {"dp": 2, "ep": 2},
            {"cp": 2, "ep": 2},
            {"dp": 2, "pp": 2, "ep": 2},
            {"dp": 2, "tp": 2, "ep": 2},
        )
    ),
)


def measure(layout: Layout, folder: Path) -> dict[str, float]:
    """The largest difference of any rank, by figure."""
    contract = _contract(layout)

    def work(rank: int) -> dict[str, Any]:
        with contract.at_device():
            return look(rank)

    def look(rank: int) -> dict[str, Any]:
        mesh = mesh_of_ranks(**layout.mesh) if layout.ranks > 1 else None
        placed = {"mesh": mesh, "expert_ranks": layout.mesh["ep"]}
        engine = contract.engine(lm=_model(layout), **placed, **OPTIMIZER)
        mine = _share(rank, layout)
        critic = contract.engine(lm=_model(layout, "value"), **placed, **OPTIMIZER)
        figures = _forward_passes(engine, critic, batch().select_indices(mine))
        if contract.trains():
            stats, *_ = [
                engine.train_batch(
                    batch(step).select_indices(mine),
                    answer_loss,
                    answer_weight,
                    mb_spec=MicroBatchSpec(n_mbs=2),
                    version_steps=step,
                )
                for step in range(UPDATES)
            ]
            weights = {name: weight.cpu().clone() for name, weight in engine.whole_parameters()}
            save_file(weights, str(folder / f"{rank}.safetensors"))
            figures |= {"loss": stats["loss"], "norm": stats["grad_norm"]}
        return figures

    is_alone = layout.ranks == 1
    results = [work(0)] if is_alone else run_on_ranks(layout.ranks, work, timeout=120)
    return _compared(layout, results, folder)


SCORES = ("log-probs", "entropies")


def _forward_passes(engine: Any, critic: Any, share: Any) -> dict[str, Any]:
    figures = {quantity: scores(engine, share, quantity).tolist() for quantity in SCORES}
    return figures | {"values": critic.forward(share, post_hook=_values).tolist()}


def _model(layout: Layout, head: str = "lm") -> Any:
    return tiny_model(layout.family, head=head, **MODEL)


def _values(output: Any, _: Any) -> torch.Tensor:
    return output.values


def _contract(layout: Layout) -> BackendContract:
    """A contract that runs backends for GPUs on a pretend device, which computes in host memory."""
    subject: Any = type(
        "Subject", (BackendContract,), {"name": layout.backend, "args": layout.args}
    )
    if "cpu" not in type(subject().backend()).DEVICES:
        subject.device, subject.at_device = "cuda:0", lambda self: pretend_cuda()
    return subject()


def _share(rank: int, layout: Layout) -> range:
    """Uneven: the first data-parallel rank has the sequences that the others, with one or two
    each, leave."""
    dp, count = layout.mesh["dp"], batch().bs
    each = 1 if dp > 2 else 2
    first = count - each * (dp - 1)
    replica = rank // (layout.ranks // dp)
    begin = 0 if replica == 0 else first + each * (replica - 1)
    return range(begin, first if replica == 0 else begin + each)


def _compared(layout: Layout, results: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    plain, critic = exact(_model(layout)), exact(_model(layout, "value"))
    before = {name: weight.detach().clone() for name, weight in plain.named_parameters()}
    apart = dict.fromkeys((*SCORES, "values"), 0.0)
    for rank, result in enumerate(results):
        share = batch().select_indices(_share(rank, layout))
        with torch.no_grad():
            expected = dict(zip(SCORES, scores_of(plain, share), strict=True))
            expected["values"] = torch.cat(logits_of(critic, share))[:, 0]
        for quantity, exact_values in expected.items():
            differences = (torch.tensor(result[quantity]) - exact_values).abs()
            # a sequence of one token has no log-probs
            apart[quantity] = max([apart[quantity], *differences.tolist()])
    if "loss" not in results[0]:
        return apart
    training = PlainTraining(plain, AdamW(**OPTIMIZER))
    expected_step, *_ = [
        training.step([batch(step)], plain_answer_loss, 1.0) for step in range(UPDATES)
    ]
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
            "updates": float(torch.stack(errors).norm() / size),
        }
        apart |= {name: max(value, apart.get(name, 0.0)) for name, value in deviations.items()}
    return apart


def measured(layouts: tuple[Layout, ...]) -> Iterator[tuple[Layout, dict[str, float]]]:
    """The figures of each layout; none of one that the engine cannot run."""
    for layout in layouts:
        if layout.refusal is not None:
            yield layout, {}
            continue
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
        refusal = {} if apart else {"refused": layout.refusal}
        rows.append({"engine": layout.title} | apart | refusal)
        if refusal and not options.json:
            print(f"{layout.title:44}  refused: {layout.refusal}")
        elif not options.json:
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
