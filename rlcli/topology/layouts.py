"""Layouts of a role: whether its engine can run them, what they take and send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rlcli.api.architecture import Architecture
from rlcli.errors import ModelError
from rlcli.ops.context_choice import PRODUCTS_PER_BYTE
from rlcli.recipe.components import argument_of
from rlcli.recipe.engine_layouts import layout_problems, possible_meshes, what_it_can
from rlcli.recipe.mesh import DevicesError, Mesh
from rlcli.topology.configs import architecture_of
from rlcli.topology.memory import Peak, memory_model, micro_batches_of, plan_memory
from rlcli.topology.placement import plan_topology

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Call, Recipe
    from rlcli.topology.report import Plan

MOST_LAYOUTS = 16
"""Layouts of a role that a plan lists: the fastest, and the recipe's own."""


@dataclass(frozen=True)
class PlannedLayout:
    """A trained role on a mesh."""

    mesh: Mesh
    peak: Peak | None
    """The peak of its calls on the fullest device; None if unknown."""
    sent: Mapping[str, int]
    """Bytes per rank and update, by kind of message."""
    idle: float
    """Share of a pipeline stage's time in an update in which it waits for others."""
    cost: float
    """Estimated time of an update, in bytes that could be sent meanwhile."""


def layout_errors(resolved: Resolved) -> Iterator[ModelError]:
    """An error for each layout that an engine cannot run, with its place and the nearest one that
    it can. Reads local files only."""
    recipe = resolved.recipe
    try:
        topology = plan_topology(recipe)
    except DevicesError:
        return  # reported when the recipe is validated
    for name, role in recipe.models.items():
        mesh = topology.placement(name).mesh
        if not role.has_weights:
            continue
        sizes = architecture_of(resolved, name)
        architecture = None if isinstance(sizes, str) else sizes
        for problem in layout_problems(recipe, name, mesh, architecture):
            where = str(resolved.origin(("models", name, *problem.key)))
            hint = what_it_can(recipe, name, mesh, problem, architecture)
            yield ModelError(problem.message, where=where, hint=hint, code="R49")


def trained_calls(recipe: Recipe) -> dict[str, Call]:
    """Trained role with weights → the call that trains it."""
    calls = {call.model: call for call in recipe.graph.values() if call.call == "train_step"}
    return {role: call for role, call in calls.items() if recipe.models[role].has_weights}


def planned_layouts(plan: Plan, role: str) -> list[PlannedLayout]:
    """The layouts of a trained role on its devices that its engine can run, the fastest first; only
    the recipe's own if the sizes of the model are unknown."""
    sizes, placement = plan.sizes[role], plan.topology.placement(role)
    meshes = {placement.mesh: None}
    if not isinstance(sizes, str):
        possible = possible_meshes(plan.recipe, role, len(placement.ranks), sizes)
        meshes |= dict.fromkeys(possible)
    layouts = sorted((planned_layout(plan, role, mesh) for mesh in meshes), key=lambda of: of.cost)
    first = layouts[:MOST_LAYOUTS]
    return first + [layout for layout in layouts[MOST_LAYOUTS:] if layout.mesh == placement.mesh]


def best_layout(plan: Plan, layouts: list[PlannedLayout]) -> PlannedLayout | None:
    """The fastest layout that fits into memory, if the devices' memory is known. One that certainly
    fits is preferred to one that fits tightly."""
    candidates = [layout for layout in layouts if layout.peak is not None]
    if plan.device_bytes is None:
        return next(iter(candidates), None)
    for verdict in ("ok", "tight"):
        for layout in candidates:
            if layout.peak is not None and plan.verdict(layout.peak) == verdict:
                return layout
    return None


def planned_layout(plan: Plan, role: str, mesh: Mesh) -> PlannedLayout:
    """Memory and messages of a trained role on a mesh, with everything else as in the plan."""
    recipe = _with_mesh(plan.recipe, role, mesh)
    topology, sizes = plan_topology(recipe), plan.sizes[role]
    memory = plan_memory(recipe, topology, plan.sizes, plan.device_bytes)
    tokens, count = micro_batches_of(recipe, topology, trained_calls(recipe)[role])
    idle = _idle_share(recipe, role, mesh, count)
    if isinstance(sizes, str) or role in memory.unknown:
        return PlannedLayout(mesh, None, {}, idle, float("inf"))
    peaks = [peak for peak in memory.peaks if peak.role == role]
    sent = memory_model(recipe, topology, role, sizes).sent(tokens, count)
    operations = _operations_per_token(sizes) * tokens * count / (mesh.tp * mesh.pp * mesh.cp)
    cost = _cost(sent, operations, idle)
    return PlannedLayout(mesh, max(peaks, key=_total, default=None), sent, idle, cost)


def _cost(sent: Mapping[str, int], operations: float, idle: float) -> float:
    return sum(sent.values()) + operations / PRODUCTS_PER_BYTE / (1 - idle)


def _with_mesh(recipe: Recipe, role: str, mesh: Mesh) -> Recipe:
    section = recipe.models[role]
    placed = section.model_copy(update={"mesh": section.mesh.model_copy(update=asdict(mesh))})
    return recipe.model_copy(update={"models": {**recipe.models, role: placed}})


def _total(peak: Peak) -> int:
    return peak.total


def _idle_share(recipe: Recipe, role: str, mesh: Mesh, micro_batches: int) -> float:
    """The idle share of n stages with v parts each and m micro-batches: (n - 1) / (v · m + n - 1).
    Narayanan et al., https://arxiv.org/abs/2104.04473, section 2.2."""
    parts = argument_of("backends", recipe.models[role].engine, "virtual_stages") or 1
    return (mesh.pp - 1) / (parts * micro_batches + mesh.pp - 1)


def _operations_per_token(sizes: Architecture) -> float:
    """In a forward and a backward pass: six for each parameter that a token meets."""
    experts = sum(layer.experts for layer in sizes.layers)
    met = sizes.experts_per_token / sizes.experts if sizes.experts else 0.0
    return 6 * (sizes.parameters() - experts * (1 - met))
