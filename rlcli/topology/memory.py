"""What a recipe needs on each device: held all the time by its roles, and at the peak of each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcli.recipe.lengths import cache_of, generation_of
from rlcli.topology.architecture import Architecture
from rlcli.topology.footprint import ERROR_PERCENT, EngineFootprint, Parts
from rlcli.topology.lengths import Lengths, group_size, lengths_of

if TYPE_CHECKING:
    from rlcli.recipe.schema import Call, Recipe
    from rlcli.topology.placement import Topology

GIB = 1 << 30
RESERVED = GIB
"""Of a GPU's memory, for CUDA itself and for communication: no estimate of ours covers it."""

ENGINES = ("fsdp", "inference")
"""Backends whose memory is known here."""


@dataclass(frozen=True)
class Held:
    """What a role keeps on each of its devices from its second step on, in bytes."""

    role: str
    parameters: int
    """Of the whole model; a number, not bytes."""
    weights: int
    optimizer: int
    whole_copy: int
    """Of a sharded role that generates."""
    left_gathered: int
    """Of a sharded role between an inference and its next update."""
    offloaded: bool
    """The weights are in host memory except during the role's own calls."""

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.whole_copy + self.left_gathered


@dataclass(frozen=True)
class Peak:
    """The highest point of a call on the fullest of its devices, in bytes."""

    call: str
    """Name of the call, or `load`."""
    role: str
    phase: str
    """load, generate, inference or update"""
    held: int
    """By all roles of the device."""
    parts: Parts

    @property
    def total(self) -> int:
        return self.held + self.parts.total

    def verdict(self, device_bytes: int, reserved: int) -> str:
        """ok: fits even if the estimate is as far off as it may be; tight: only if it is not; else too much."""
        room = device_bytes - reserved
        if self.total * (100 + ERROR_PERCENT) <= room * 100:
            return "ok"
        return "tight" if self.total <= room else "too much"


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of the devices."""

    held: tuple[Held, ...]
    peaks: tuple[Peak, ...]
    unknown: Mapping[str, str]
    """Role → why nothing can be said about it. Peaks then leave it out."""
    lengths: Lengths

    @property
    def highest(self) -> int:
        return max((peak.total for peak in self.peaks), default=0)


def plan_memory(recipe: Recipe, topology: Topology, sizes: Mapping[str, Architecture | str]) -> MemoryPlan:
    """Memory of a recipe laid out on its cluster; `sizes` has every role with weights, or why they are unknown."""
    engines: dict[str, EngineFootprint] = {}
    unknown = {}
    for role, architecture in sizes.items():
        engine = _engine(recipe, topology, role, architecture)
        if isinstance(engine, str):
            unknown[role] = engine
        else:
            engines[role] = engine
    held = {role: _held(recipe, role, engine) for role, engine in engines.items()}
    lengths = lengths_of(recipe)
    peaks = _load_peaks(topology, engines)
    for name, call in recipe.graph.items():
        if call.model in engines and call.call != "evaluate":
            parts = _parts(recipe, topology, call, engines[call.model], lengths)
            phase = "update" if call.call == "train_step" else call.call
            peaks.append(Peak(name, call.model, phase, _held_beside(topology, held, call.model), parts))
    return MemoryPlan(tuple(held.values()), tuple(peaks), unknown, lengths)


def _engine(recipe: Recipe, topology: Topology, role: str, sizes: Architecture | str) -> EngineFootprint | str:
    if isinstance(sizes, str):
        return sizes
    backend = recipe.models[role].backend
    assert backend is not None
    mesh = topology.placement(role).mesh
    if backend.type not in ENGINES:
        return f"the memory of the backend {backend.type} is not known here"
    if mesh.size != mesh.dp:
        return f"the memory of a mesh such as {mesh} is not known here: only dp is"
    return EngineFootprint(
        sizes=sizes,
        head=recipe.models[role].head,
        trained=backend.type == "fsdp",
        ranks=mesh.dp,
        width=4 if backend.args.get("dtype", "auto") == "float32" else 2,
        checkpointing=bool(backend.args.get("gradient_checkpointing", False)),
    )


def _held(recipe: Recipe, role: str, engine: EngineFootprint) -> Held:
    calls = [call for call in recipe.graph.values() if call.model == role]
    generates = any(call.call == "generate" for call in calls)
    return Held(
        role=role,
        parameters=engine.parameters,
        weights=engine.weights,
        optimizer=engine.optimizer if any(call.call == "train_step" for call in calls) else 0,
        whole_copy=engine.whole_copy if generates else 0,
        left_gathered=engine.left_gathered if any(call.call == "inference" for call in calls) else 0,
        offloaded=recipe.cluster.device != "cpu" and any(call.hooks.offload for call in calls),
    )


def _held_beside(topology: Topology, held: Mapping[str, Held], role: str) -> int:
    """Of all roles on the fullest device of a role, while it works. What that gathers is counted with the call."""
    of_others = (
        sum(held[r].total for r in topology.roles_on(rank) if r in held and r != role and not held[r].offloaded)
        for rank in _first_ranks(topology, role)
    )
    return held[role].total - held[role].left_gathered + max(of_others)


def _first_ranks(topology: Topology, role: str) -> list[int]:
    """One rank of the role for each set of roles that its devices hold: the others are like them."""
    seen: dict[tuple[str, ...], int] = {}
    for rank in topology.placement(role).ranks:
        seen.setdefault(topology.roles_on(rank), rank)
    return list(seen.values())


def _load_peaks(topology: Topology, engines: Mapping[str, EngineFootprint]) -> list[Peak]:
    """Roles load one after another, each whole before it is sharded: the worst of them."""
    peaks = []
    for role, engine in engines.items():
        for rank in _first_ranks(topology, role):
            on_rank = [r for r in topology.roles_on(rank) if r in engines]
            there = sum(engines[r].weights for r in on_rank[: on_rank.index(role) + 1])
            peaks.append(Peak("load", role, "load", there, engine.load()))
    return [max(peaks, key=lambda peak: peak.total)] if peaks else []


def _parts(recipe: Recipe, topology: Topology, call: Call, engine: EngineFootprint, lengths: Lengths) -> Parts:
    group = group_size(recipe)
    rows = -(-recipe.train.prompts_per_step // topology.placement(call.model).mesh.dp)
    if call.call == "generate":
        settings = generation_of(recipe, call)
        new, room = int(settings["max_new_tokens"]), cache_of(recipe, call.model)
        slots = min(rows * group, int(settings["max_concurrent_responses"]))
        slots = slots if room is None else min(slots, max(1, room // (lengths.prompt + new)))
        return engine.generate(slots, lengths.prompt, new, min(rows, -(-slots // group)))
    tokens, count = micro_batches_of(recipe, topology, call)
    return engine.update(tokens, count) if call.call == "train_step" else engine.inference(tokens)


def micro_batches_of(recipe: Recipe, topology: Topology, call: Call) -> tuple[int, int]:
    """(tokens of the largest micro-batch, number of them per rank) for the longest sequences of one optimizer step or
    one inference. A sample, which is a group of responses, is never cut."""
    sample = group_size(recipe) * lengths_of(recipe).sequence
    rows = -(-recipe.train.prompts_per_step // topology.placement(call.model).mesh.dp)
    if call.call == "train_step":
        rows = -(-rows // topology.batch.minibatches.get(call.model, 1))
    cap = call.max_tokens_per_microbatch or recipe.train.max_tokens_per_microbatch
    least = min(rows, call.microbatches or recipe.train.microbatches)
    together = max(1, min(-(-rows // least), cap // sample))
    return together * sample, -(-rows // together)


def as_json(plan: MemoryPlan, device_bytes: int | None, reserved: int) -> dict[str, Any]:
    """The plan in bytes, with verdicts where the size of a device is given."""
    return {
        "within_percent": ERROR_PERCENT,
        "longest_prompt": plan.lengths.prompt,
        "longest_sequence": plan.lengths.sequence,
        "lengths_are_assumed": plan.lengths.assumed,
        "held": [vars(held) | {"total": held.total} for held in plan.held],
        "peaks": [
            {"call": peak.call, "role": peak.role, "phase": peak.phase, "held": peak.held, **vars(peak.parts)}
            | {"total": peak.total}
            | ({"verdict": peak.verdict(device_bytes, reserved)} if device_bytes else {})
            for peak in plan.peaks
        ],
        "unknown": dict(plan.unknown),
    }
