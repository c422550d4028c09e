"""Checks that roles fit on the cluster's devices, and their meshes on the roles' devices."""

from __future__ import annotations

from collections.abc import Mapping as ReadMapping

from rlcli.recipe.components import declared
from rlcli.recipe.mesh import DIMENSIONS, DevicesError, devices_of, mesh_of, world_of
from rlcli.recipe.parsing.tree import Path
from rlcli.recipe.schema import Role
from rlcli.recipe.validation.semantics.notes import Notes, in_words

CLUSTER: tuple[Path, ...] = (("cluster", "nodes"), ("cluster", "devices_per_node"))


def check(notes: Notes) -> None:
    cluster, launch = notes.recipe.cluster, notes.recipe.launch.type
    try:
        world = world_of(cluster)
    except DevicesError as error:
        notes.note("R49", str(error), notes.first_set(*CLUSTER), needs=CLUSTER)
        return
    needs = [*CLUSTER, ("launch", "type")]
    if launch == "inline" and world > 1:
        what = f"launch inline runs one process, but the cluster has {world} devices"
        key: Path = ("launch", "type") if notes.is_set(("launch",)) else ("cluster", "devices_per_node")
        notes.note("R49", what, key, "use launch=local", needs=needs)
    parts = sum(part.nodes for part in notes.recipe.launch.slurm.parts)
    if parts not in (0, cluster.nodes):
        what = f"the parts of the job have {parts} nodes, but the cluster has {cluster.nodes}"
        key = ("launch", "slurm", "parts")
        notes.note("R49", what, key, f"write cluster.nodes={parts}", needs=[CLUSTER[0], key])
    _prompts(notes, {name: _role(notes, name, role, world) for name, role in notes.recipe.models.items()})


def _prompts(notes: Notes, replicas: ReadMapping[str, int]) -> None:
    """Every data-parallel rank needs a prompt. `replicas`: role → its data-parallel ranks."""
    rows = notes.recipe.train.prompts_per_step
    wide = {name: ranks for name, ranks in replicas.items() if ranks > rows}
    if not wide:
        return
    most = max(wide.values())
    has, fewer = ("have" if len(set(wide.values())) == 1 else "have up to"), "fewer devices"
    if len(wide) == 1:
        has, fewer = "has", f"models.{next(iter(wide))}.devices=0-{rows - 1}"
    what = f"train.prompts_per_step is {rows}, but {in_words(wide)} {has} {most} data-parallel ranks"
    notes.note("R49", what, ("train", "prompts_per_step"), f"use at least {most}, or {fewer}", needs=CLUSTER)


def _role(notes: Notes, name: str, role: Role, world: int) -> int:
    """Check the devices of a role; returns its number of data-parallel ranks, 0 if they are wrong or in doubt."""
    where: Path = ("models", name)
    layout: list[Path] = [(*where, "mesh"), (*where, "devices")]
    try:
        ranks = devices_of(name, role.devices, world)
        mesh = mesh_of(name, role.mesh, len(ranks))
    except DevicesError as error:
        code = "R50" if error.missing else "R49"
        notes.note(code, str(error), (*where, error.key), error.hint, needs=[*CLUSTER, *layout])
        return 0
    backend = role.backend.type if role.backend is not None else ""
    _device_of(notes, name, backend)
    able = declared("backends", backend, "DIMENSIONS")
    for dimension in DIMENSIONS:
        size = getattr(mesh, dimension)
        if size > 1 and isinstance(able, tuple) and dimension not in able:
            what = f"the backend {backend} of {name} knows no {dimension}, which is to be {size}"
            hint = f"it knows {', '.join(able) or 'one device'}"
            notes.note("R49", what, (*where, "mesh", dimension), hint, needs=[(*where, "backend", "type")])
    return 0 if any(map(notes.is_doubtful, layout)) else mesh.dp


def _device_of(notes: Notes, name: str, backend: str) -> None:
    wanted, able = notes.recipe.cluster.device, declared("backends", backend, "DEVICES")
    if wanted != "auto" and isinstance(able, tuple) and wanted not in able:
        what = f"the backend {backend} of {name} runs on {' and '.join(able)} only, not on {wanted}"
        needs = [("cluster", "device"), ("models", name, "backend", "type")]
        notes.note("R49", what, ("cluster", "device"), f"choose another models.{name}.backend.type", needs=needs)
