"""Everything that is known about a recipe before it runs, in one object and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlcli.errors import ResourceError, UsageError
from rlcli.project import search_paths_kept
from rlcli.recipe.graph import graphs_of, made_keys, reasons_to_drop, stages
from rlcli.recipe.mesh import DevicesError
from rlcli.recipe.parsing.tree import dotted
from rlcli.recipe.requirements_here import libraries_to_install
from rlcli.recipe.warm_start import chain
from rlcli.topology.advice import Fitting
from rlcli.topology.configs import architecture_of, saved_width
from rlcli.topology.drawing import weights_text
from rlcli.topology.groups import process_groups
from rlcli.topology.layouts import (
    PlannedLayout,
    best_layout,
    planned_layout,
    planned_layouts,
    trained_calls,
)
from rlcli.topology.memory import RESERVED, MemoryPlan, Peak, as_json, plan_memory
from rlcli.topology.overlap import Timetable
from rlcli.topology.placement import RolePlacement, Topology, plan_topology
from rlcli.topology.storage import Storage, plan_storage

if TYPE_CHECKING:
    from rlcli.api.architecture import Architecture
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe


@dataclass(frozen=True)
class Plan:
    """A recipe laid out on its cluster, with what it requires."""

    resolved: Resolved
    topology: Topology
    runs_first: tuple[str, ...]
    """Recipes whose results it starts from, in the order to run them."""
    sizes: dict[str, Architecture | str]
    """Role with weights → its sizes, or why they are unknown."""
    memory: MemoryPlan
    storage: Storage
    missing: tuple[ResourceError, ...]
    """Libraries that its components require and that are not installed here:
    the cluster may have them."""
    device_bytes: int | None
    """Memory of a device, if the user has given it."""

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    @property
    def reserved(self) -> int:
        """Part of a device's memory that no estimate covers."""
        return (
            0
            if self.recipe.cluster.device == "cpu"
            else min(RESERVED, (self.device_bytes or RESERVED) // 4)
        )

    @cached_property
    def advice(self) -> dict[str, tuple[str, ...]]:
        """Call that needs too much memory → overrides with which it fits."""
        if self.device_bytes is None:
            return {}
        fitting = Fitting(self.recipe, self.topology, self.sizes, self.device_bytes, self.reserved)
        return fitting.advice(self._too_large_calls)

    @property
    def _too_large_calls(self) -> list[str]:
        return [peak.call for peak in self.memory.peaks if self.verdict(peak) == "too much"]

    @property
    def shortfalls(self) -> tuple[str, ...]:
        """Why the run does not fit, or why that is unknown: what `plan --strict` refuses."""
        reasons = [f"{call} needs more memory than a device has" for call in self._too_large_calls]
        reasons += [
            f"the memory of {role} is unknown: {why}" for role, why in self.memory.unknown.items()
        ]
        reasons += [
            f"servers of {servers.role} share devices, or need more than a node has"
            for servers in self.memory.servers
            if servers.do_not_fit(self.topology.devices_per_node)
        ]
        if self.storage.is_short:
            reasons.append(
                f"the disk of {self.storage.folder} has too little space for checkpoints and models"
            )
        return tuple(reasons)

    def verdict(self, peak: Peak) -> str:
        return peak.verdict(self.device_bytes, self.reserved) if self.device_bytes else ""


@search_paths_kept()
def make_plan(
    resolved: Resolved,
    device_bytes: int | None = None,
    nodes: int | None = None,
    devices: int | None = None,
) -> Plan:
    """Everything about a validated recipe, on its own cluster or on one with the given nodes and
    devices per node. Reads local files only. Raises RecipeError if a warm start is wrong,
    UsageError if roles do not fit."""
    first = tuple(source.recipe.name for source in chain(resolved))
    resolved = _on_cluster(resolved, nodes, devices)
    topology = plan_topology(resolved.recipe)
    sizes = {
        name: architecture_of(resolved, name)
        for name, role in resolved.recipe.models.items()
        if role.has_weights
    }
    memory = plan_memory(resolved.recipe, topology, sizes, device_bytes)
    widths = {role: saved_width(resolved, role) for role in resolved.recipe.saved_roles}
    storage = plan_storage(resolved.recipe, parameters_of(resolved.recipe, sizes), widths)
    missing = tuple(libraries_to_install(resolved))
    return Plan(resolved, topology, first, sizes, memory, storage, missing, device_bytes)


def parameters_of(recipe: Recipe, sizes: Mapping[str, Architecture | str]) -> dict[str, int]:
    """Role → parameters of its whole model, if they can be counted."""
    countable = {role: size for role, size in sizes.items() if not isinstance(size, str)}
    return {role: size.parameters(recipe.models[role].head) for role, size in countable.items()}


def _on_cluster(resolved: Resolved, nodes: int | None, devices: int | None) -> Resolved:
    """The recipe on so many nodes, with so many devices each; None: as it says."""
    asked = {"nodes": nodes, "devices_per_node": devices}
    changes = {key: count for key, count in asked.items() if count is not None}
    if not changes:
        return resolved
    recipe = _resized(resolved.recipe, changes)
    try:
        plan_topology(recipe)
    except DevicesError as error:
        raise UsageError(
            str(error), hint="give --nodes and --devices that the roles' devices and meshes fit"
        ) from None
    overridden = {
        "cluster.nodes": recipe.cluster.nodes,
        "cluster.devices_per_node": recipe.cluster.devices_per_node,
        "launch": recipe.launch.type,
    }
    replaced = (*overridden, "launch.type")
    remaining = [
        override for override in resolved.overrides if override.partition("=")[0] not in replaced
    ]
    added = [f"{key}={value}" for key, value in overridden.items()]
    return replace(resolved, recipe=recipe, overrides=(*remaining, *added))


def _resized(recipe: Recipe, changes: Mapping[str, int]) -> Recipe:
    """The recipe with another cluster, on which several ranks are several processes."""
    cluster = recipe.cluster.model_copy(update=changes)
    launch = recipe.launch
    if launch.type == "inline" and cluster.nodes * cluster.devices_per_node > 1:
        launch = launch.model_copy(update={"type": "local"})
    return recipe.model_copy(update={"cluster": cluster, "launch": launch})


def plan_json(plan: Plan, layouts: bool = False) -> dict[str, Any]:
    """The plan for scripts; sizes in bytes. With `layouts`, also what other layouts would take."""
    missing = [
        {"what": problem.what, "where": problem.where, "fix": problem.hint}
        for problem in plan.missing
    ]
    return {
        "recipe": plan.recipe.name,
        "runs_first": list(plan.runs_first),
        "missing_libraries": missing,
        **_processes(plan),
        **_calls(plan),
        **_resources(plan),
        "shortfalls": list(plan.shortfalls),
        "layouts": {role: _layouts(plan, role, layouts) for role in trained_calls(plan.recipe)},
    }


def _processes(plan: Plan) -> dict[str, Any]:
    """The cluster, and what runs on it."""
    recipe, topology = plan.recipe, plan.topology
    groups = [{"ranks": list(group.ranks), "roles": list(group.roles)} for group in topology.groups]
    return {
        "nodes": topology.nodes,
        "devices_per_node": topology.devices_per_node,
        "world_size": topology.world_size,
        "device": topology.device,
        "launch": topology.launch,
        "roles": [_role(recipe, placement) for placement in topology.placements],
        "servers": _groups_of(plan, "server"),
        "pools": _groups_of(plan, "pool"),
        "groups": groups,
    }


def _calls(plan: Plan) -> dict[str, Any]:
    """The order of the calls, which of them overlap, and their keys."""
    graph = plan.recipe.graph
    timetable = Timetable(plan.recipe, plan.topology)
    drops = {name: list(reasons_to_drop(call)) for name, call in graph.items()}
    return {
        "stages": stages(graph),
        "overlaps": {"same_step": timetable.overlaps(0), "step_before": timetable.overlaps(1)},
        "drops": {name: reasons for name, reasons in drops.items() if reasons},
        "keys": _keys(plan.resolved),
    }


def _keys(resolved: Resolved) -> dict[str, Any]:
    """Call → the keys it reads and produces, and where they were set."""
    documents: dict[str, Any] = {}
    for path, calls, dataset in graphs_of(resolved.recipe):
        for name, call in calls.items() if dataset is not None else ():
            inputs, outputs = (*path, name, "inputs"), (*path, name, "outputs")
            documents[dotted((*path, name))] = {
                "reads": {"keys": list(call.inputs), "origin": str(resolved.origin(inputs))},
                "makes": {"keys": made_keys(call), "origin": str(resolved.origin(outputs))},
            }
    return documents


def _resources(plan: Plan) -> dict[str, Any]:
    """The work of a step, memory and disk."""
    batch = plan.topology.batch
    memory = as_json(plan.memory, plan.device_bytes, plan.reserved)
    memory["device"] = plan.device_bytes
    memory["advice"] = {call: list(keys) for call, keys in plan.advice.items()}
    return {
        "batch": asdict(batch) | {"sequences": batch.sequences, "lines": batch.lines()},
        "memory": memory,
        "storage": asdict(plan.storage) | {"needed": plan.storage.needed},
    }


def _layouts(plan: Plan, role: str, others: bool) -> list[dict[str, Any]]:
    mesh = plan.topology.placement(role).mesh
    if not others:
        return [_layout(plan, planned_layout(plan, role, mesh)) | {"is_own": True}]
    layouts = planned_layouts(plan, role)
    best = best_layout(plan, layouts)
    return [
        _layout(plan, layout) | {"is_own": layout.mesh == mesh, "is_advised": layout is best}
        for layout in layouts
    ]


def _layout(plan: Plan, layout: PlannedLayout) -> dict[str, Any]:
    described = {"mesh": asdict(layout.mesh), "sent": dict(layout.sent), "idle": layout.idle}
    if layout.peak is None:
        return described | {"memory": None, "verdict": ""}
    return described | {"memory": layout.peak.total, "verdict": plan.verdict(layout.peak)}


def _role(recipe: Recipe, placement: RolePlacement) -> dict[str, Any]:
    role = recipe.models[placement.role]
    return {
        "role": placement.role,
        "ranks": list(placement.ranks),
        "mesh": asdict(placement.mesh),
        "backend": role.backend.type,  # type: ignore[union-attr]
        "trained": placement.role in recipe.trained_roles,
        "weights": weights_text(role),
    }


def _groups_of(plan: Plan, kind: str) -> list[dict[str, Any]]:
    groups = (group for group in process_groups(plan.recipe, plan.topology) if group.kind == kind)
    return [
        {
            "name": group.name,
            "nodes": list(group.nodes),
            "processes_of_each": group.processes_of_each,
        }
        for group in groups
    ]
