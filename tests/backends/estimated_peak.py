"""Peaks of memory as a plan estimates them, for the phases that `measured_peak.py` measures."""

from __future__ import annotations

from rlcli.api.memory import Generation, PlacedRole
from rlcli.backends._deepspeed_memory import DeepSpeedMemory
from rlcli.backends._fsdp_memory import FSDPMemory
from rlcli.backends._memory import InferenceMemory
from rlcli.recipe.mesh import DIMENSIONS
from rlcli.topology.architecture import read_architecture

MODELS = {"fsdp": FSDPMemory, "inference": InferenceMemory, "deepspeed": DeepSpeedMemory}
CALLS = {"update": "train_step", "inference": "inference", "generate": "generate"}


def memory(
    backend: str,
    config: dict,
    head: str = "lm",
    calls=("train_step",),
    longest: int = 0,
    device: str = "cpu",
    **arguments,
):
    """Of a role; `arguments` are those of the backend, and sizes of the mesh."""
    mesh = {dimension: arguments.pop(dimension, 1) for dimension in DIMENSIONS}
    return MODELS[backend](
        PlacedRole(read_architecture(config), head, mesh, arguments, calls, longest, device)
    )


def estimated(
    run: dict, config: dict, dtype: str, dimension: str = "dp", ranks: int = 1, device: str = "cpu"
) -> tuple[int, int]:
    """(memory before, memory at the peak), in bytes.
    The first inference or generation is not measured."""
    calls = {CALLS[run["phase"]], "inference"}
    model = memory(
        run["backend"],
        config,
        run.get("head", "lm"),
        calls=calls,
        dtype=dtype,
        device=device,
        **{dimension: ranks},
        **run.get("args", {}),
    )
    micro_batches, resident = run.get("micro_batches", 1), model.resident()
    tokens = run["count"] * run["length"] // micro_batches
    if run["phase"] == "update":
        before = resident.weights + resident.optimizer
        return before, before + model.update(tokens, micro_batches).total
    before = resident.weights
    if run["phase"] == "inference":
        return before, resident.weights + model.inference(tokens).total
    asked = Generation(run["count"], run["group"], run["length"], run["new"], run["slots"])
    return before, before + model.generate(asked).total
