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
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlcli import registry
from rlcli.api.config import MicroBatchSpec
from rlcli.api.layout import RoleLayout
from rlcli.recipe.mesh import DIMENSIONS, Mesh
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.forward import scores
from rlcli.testing.backend.objectives import answer_loss, answer_weight
from rlcli.testing.backend.plain import (
    AdamW,
    PlainTraining,
    exact,
    logits_of,
    plain_answer_loss,
    scores_of,
)
from rlcli.testing.backend.samples import batch
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_model

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "fakes")]
from pretend_cuda import pretend_cuda  # noqa: E402 - what tests share

LIMITS = {
    "loss": 1e-6,
    "norm": 1e-5,
    "updates": 1e-4,
    "log-probs": 1e-5,
    "entropies": 1e-5,
    "values": 1e-5,
}
OPTIMIZER = {
    "lr": 1.0,
    "weight_decay": 1e-3,
    "beta1": 0.8,
    "beta2": 0.9,
    "eps": 1.0,
    "max_grad_norm": 0.5,
}
"""With which weights move by their gradients, not by their decay: else a wrong gradient would not
show."""
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


Where = tuple[dict[str, int], dict[str, Any]]
"""A mesh, and settings of the backend."""
CONTEXT_PARALLEL: list[Where] = list(
    product(
        ({"cp": 2}, {"cp": 4}, {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}),
        ({"context_parallel": "ulysses"}, {"context_parallel": "ring"}),
    )
)
PLACES: dict[tuple[str, str], list[Where]] = {
    ("fsdp", "llama"): [
        ({}, {}),
        ({"dp": 2}, {}),
        ({"tp": 2}, {}),
        ({"dp": 2, "tp": 2}, {}),
        *CONTEXT_PARALLEL,
    ],
    ("fsdp", "mixtral"): [
        ({"dp": 2, "ep": 2}, {}),
        ({"dp": 4, "ep": 2}, {}),
        ({"cp": 2, "ep": 2}, {"context_parallel": "ulysses"}),
        ({"dp": 2, "cp": 2, "ep": 2}, {"context_parallel": "ring"}),
    ],
    ("megatron", "llama"): [
        ({}, {}),
        ({"tp": 2}, {}),
        ({"pp": 2}, {}),
        ({"tp": 2, "pp": 2}, {}),
        ({"tp": 2, "dp": 2}, {}),
        ({"cp": 2}, {"context_parallel": "ulysses"}),
        ({"cp": 2, "dp": 2}, {"context_parallel": "ring"}),
        ({"pp": 2}, {"virtual_stages": 2}),
    ],
    ("megatron", "mixtral"): [
        ({}, {}),
        ({"dp": 2, "ep": 2}, {}),
        ({"cp": 2, "ep": 2}, {}),
        ({"dp": 2, "pp": 2, "ep": 2}, {}),
        ({"dp": 2, "tp": 2, "ep": 2}, {}),
    ],
    ("deepspeed", "llama"): [({"dp": 2}, {"zero_stage": 1}), ({"dp": 2}, {"zero_stage": 3})],
    ("inference", "llama"): [({}, {}), ({"cp": 2}, {})],
}
"""(backend, family) → where it is compared."""
LAYOUTS = tuple(
    Layout(backend, *where, family)
    for (backend, family), places in PLACES.items()
    for where in places
)


def measure(layout: Layout, folder: Path) -> dict[str, float]:
    """The largest difference of any rank, by figure."""
    contract = _contract(layout)

    def work(rank: int) -> dict[str, Any]:
        with contract.at_device():
            return _figures(contract, layout, rank, folder)

    is_alone = layout.ranks == 1
    results = [work(0)] if is_alone else run_on_ranks(layout.ranks, work, timeout=120)
    return _compared(layout, results, folder)


def _figures(contract: BackendContract, layout: Layout, rank: int, folder: Path) -> dict[str, Any]:
    """Of a rank, whose weights after the updates are in the folder."""
    mesh = mesh_of_ranks(**layout.mesh) if layout.ranks > 1 else None
    settings = {"mesh": mesh, "expert_ranks": layout.mesh["ep"], **OPTIMIZER}
    engine = contract.engine(lm=_model(layout), **settings)
    critic = contract.engine(lm=_model(layout, "value"), **settings)
    mine = _share(rank, layout)
    figures = _forward_passes(engine, critic, batch().select_indices(mine))
    if not contract.cls.TRAINS:
        return figures
    first, *_ = [_update(engine, step, mine) for step in range(UPDATES)]
    weights = {name: weight.cpu().clone() for name, weight in engine.whole_parameters()}
    save_file(weights, str(folder / f"{rank}.safetensors"))
    return figures | {"loss": first["loss"], "norm": first["grad_norm"]}


def _update(engine: Any, step: int, mine: range) -> Any:
    share = batch(step).select_indices(mine)
    cuts = MicroBatchSpec(n_mbs=2)
    return engine.train_batch(share, answer_loss, answer_weight, mb_spec=cuts, version_steps=step)


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
    plain = exact(_model(layout))
    apart: dict[str, float] = {}
    for deviations in (
        *_of_forward_passes(layout, plain, results),
        *(_of_updates(plain, results, folder) if "loss" in results[0] else ()),
    ):
        for name, value in deviations.items():
            apart[name] = max(value, apart.get(name, 0.0))
    return apart


def _of_forward_passes(
    layout: Layout, plain: Any, results: list[dict[str, Any]]
) -> Iterator[dict[str, float]]:
    critic = exact(_model(layout, "value"))
    for rank, result in enumerate(results):
        share = batch().select_indices(_share(rank, layout))
        with torch.no_grad():
            expected = dict(zip(SCORES, scores_of(plain, share), strict=True))
            expected["values"] = torch.cat(logits_of(critic, share))[:, 0]
        for quantity, exact_values in expected.items():
            differences = (torch.tensor(result[quantity]) - exact_values).abs()
            # a sequence of one token has no log-probs
            yield {quantity: max([0.0, *differences.tolist()])}


def _of_updates(
    plain: Any, results: list[dict[str, Any]], folder: Path
) -> Iterator[dict[str, float]]:
    before = {name: weight.detach().clone() for name, weight in plain.named_parameters()}
    training = PlainTraining(plain, AdamW(**OPTIMIZER))
    first, *_ = [training.step([batch(step)], plain_answer_loss, 1.0) for step in range(UPDATES)]
    expected = training.weights()
    moved = {name: expected[name] - before[name] for name in expected}
    for rank, result in enumerate(results):
        weights = load_file(folder / f"{rank}.safetensors")
        missed = {name: weights[name].double() - expected[name] for name in expected}
        yield {
            "loss": abs(result["loss"] / first["loss"] - 1),
            "norm": abs(result["norm"] / first["grad_norm"] - 1),
            "updates": _norm(missed) / _norm(moved),
        }


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


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
        print(f"{'':{TITLE}}" + "".join(f"{name:>12}" for name in LIMITS))
    rows, failed = [], False
    for layout, apart in measured(layouts):
        failed = failed or bool(_above(apart))
        rows.append({"engine": layout.title} | (apart or {"refused": layout.refusal}))
        if not options.json:
            print(_line(layout, apart), flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))
    return int(failed)


TITLE = 60
"""Columns."""


def _above(apart: dict[str, float]) -> list[str]:
    return [name for name, value in apart.items() if not value <= LIMITS[name]]


def _line(layout: Layout, apart: dict[str, float]) -> str:
    if not apart:
        return f"{layout.title:{TITLE}}  refused: {layout.refusal}"
    line = f"{layout.title:{TITLE}}"
    for name in LIMITS:
        line += f"{apart[name]:12.1e}" if name in apart else f"{'-':>12}"
    if over := _above(apart):
        line += f"  above the limit: {', '.join(over)}"
    return line


if __name__ == "__main__":
    sys.exit(main())
