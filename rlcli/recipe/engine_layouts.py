"""Whether the engine of a role can run its layout, and the nearest one that it can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from math import log2
from typing import TYPE_CHECKING, Any

from rlcli import registry
from rlcli.api.layout import LayoutProblem, RoleLayout, undivided
from rlcli.recipe.components import argument_names, argument_of, declared
from rlcli.recipe.expansion.rollouts import as_rollout
from rlcli.recipe.mesh import DIMENSIONS, Mesh
from rlcli.recipe.parsing.tree import dotted

if TYPE_CHECKING:
    from rlcli.api.architecture import Architecture
    from rlcli.recipe.schema import Component, Recipe


def layout_problems(
    recipe: Recipe, name: str, mesh: Mesh, sizes: Architecture | None = None
) -> Iterator[LayoutProblem]:
    """What the engine of a role cannot do of a mesh whose dimensions it knows; what depends on the
    sizes of its model is left out where they are unknown."""
    backend = recipe.models[name].engine
    layout = _role_layout(recipe, name, mesh, sizes)
    yield from undivided(layout)
    if (problems := registry.load_declared("backends", backend.type, "LAYOUT")) is not None:
        yield from problems(layout)


def whole_sequences(recipe: Recipe, name: str, mesh: Mesh) -> str | None:
    """Why the engine of a role computes every sequence as a whole; None: common prefixes once."""
    backend = recipe.models[name].engine
    reason_of = registry.load_declared("backends", backend.type, "WHOLE_SEQUENCES")
    if reason_of is None:
        return f"{backend.type} cannot share them"
    reason: str | None = reason_of(_role_layout(recipe, name, mesh, None))
    return reason


def _role_layout(recipe: Recipe, name: str, mesh: Mesh, sizes: Architecture | None) -> RoleLayout:
    arguments = arguments_of(recipe.models[name].engine)
    return RoleLayout(name, asdict(mesh), arguments, recipe.cluster.device, sizes)


def arguments_of(backend: Component) -> dict[str, Any]:
    """All arguments of a backend, including defaults."""
    names = argument_names("backends", backend.type) or ()
    return {name: argument_of("backends", backend, name) for name in names}


def possible_meshes(
    recipe: Recipe, name: str, devices: int, sizes: Architecture | None = None
) -> Iterator[Mesh]:
    """The meshes on `devices` devices that the engine of a role can run."""
    for mesh in _meshes(recipe, name, devices):
        if not any(layout_problems(recipe, name, mesh, sizes)):
            yield mesh


def _meshes(recipe: Recipe, name: str, devices: int) -> Iterator[Mesh]:
    """The meshes of the dimensions that the engine knows: tensor-parallel ranks are on one node,
    and there is a prompt for each data-parallel rank."""
    able = declared("backends", recipe.models[name].engine.type, "DIMENSIONS") or ("dp",)

    def degrees(dimension: str, ranks: int) -> list[int]:
        is_able = dimension in able
        return [size for size in range(1, ranks + 1) if ranks % size == 0] if is_able else [1]

    for tp in degrees("tp", devices):
        for pp in degrees("pp", devices // tp):
            for cp in degrees("cp", devices // (tp * pp)):
                dp = devices // (tp * pp * cp)
                if tp <= recipe.cluster.devices_per_node and dp <= recipe.train.prompts_per_step:
                    yield from (Mesh(dp, tp, pp, cp, ep) for ep in degrees("ep", dp * cp))


def nearest_layout(
    recipe: Recipe, name: str, mesh: Mesh, sizes: Architecture | None = None
) -> Mesh | None:
    """The mesh on the same number of devices that differs least from this one, by the ratios of
    degrees, among those that the engine can run."""

    def distance(candidate: Mesh) -> float:
        return sum(
            abs(log2(getattr(candidate, dimension) / getattr(mesh, dimension)))
            for dimension in DIMENSIONS
        )

    for candidate in sorted(_meshes(recipe, name, mesh.size), key=distance):
        if not any(layout_problems(recipe, name, candidate, sizes)):
            return candidate
    return None


def mesh_overrides(name: str, mesh: Mesh, before: Mesh) -> str:
    """What changes one mesh to the other, as it is typed. dp follows from the devices."""
    changed = [
        f"{dotted(as_rollout(('models', name, 'mesh', dimension)))}={getattr(mesh, dimension)}"
        for dimension in DIMENSIONS
        if getattr(mesh, dimension) != getattr(before, dimension) and dimension != "dp"
    ]
    return " ".join(changed)


def what_it_can(
    recipe: Recipe,
    name: str,
    mesh: Mesh,
    problem: LayoutProblem,
    sizes: Architecture | None = None,
) -> str:
    """The hint of a layout that is refused."""
    remedies = []
    if problem.value is not None:
        remedies.append(f"{dotted(as_rollout(('models', name, *problem.key)))}={problem.value}")
    if (nearest := nearest_layout(recipe, name, mesh, sizes)) is not None:
        overrides = mesh_overrides(name, nearest, mesh)
        remedies.append(f"the nearest layout that it can run is {nearest}: {overrides}")
    return ", or ".join(remedies) or "use another number of devices, or another backend"
