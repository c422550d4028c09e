"""Checks of what a recipe asks of Slurm for its job."""

from __future__ import annotations

from rlcli.recipe.parsing.tree import dotted
from rlcli.recipe.sections.launch import OF_JOB, OF_NODES, OURS, Slurm
from rlcli.recipe.validation.semantics.notes import Notes


def check(notes: Notes) -> None:
    _nodes(notes)
    _options(notes)
    _container(notes)


def _nodes(notes: Notes) -> None:
    """The parts of a heterogeneous job are all of its nodes."""
    nodes = notes.recipe.cluster.nodes
    of_parts = sum(segment.nodes for segment in notes.recipe.launch.slurm.parts)
    if of_parts not in (0, nodes):
        message = f"the parts of the job have {of_parts} nodes, but the cluster has {nodes}"
        key = ("launch", "slurm", "parts")
        hint, needs = f"write cluster.nodes={of_parts}", [("cluster", "nodes"), key]
        notes.note("R49", message, key, hint, needs)


def _options(notes: Notes) -> None:
    """Options of sbatch that rlcli sets itself, or has a key for, are refused."""
    section = ("launch", "slurm", "options")
    for name in notes.recipe.launch.slurm.options:
        key = name.replace("-", "_")
        if name in OURS or key in (*OF_NODES, *OF_JOB):
            has_key = key in Slurm.model_fields
            hint = f"launch.slurm.{key} is the key for it" if has_key else "rlcli sets it itself"
            notes.note("R49", f"{dotted(section)} cannot have {name}", (*section, name), hint)


def _container(notes: Notes) -> None:
    """A container needs an engine and an image; without an engine nothing would run in it."""
    container, section = notes.recipe.launch.slurm.container, ("launch", "slurm", "container")
    engine, image = (*section, "engine"), (*section, "image")
    if container.image is None and container.engine != "none":
        message = f"{dotted(engine)} is {container.engine}, but {dotted(image)} is not set"
        notes.note("R39", message, engine, f"{dotted(image)}=IMAGE", needs=[image])
    unused = [key for key in ("image", "mounts", "python", "options") if getattr(container, key)]
    if container.engine == "none" and unused:
        key = (*section, unused[0])
        message = (
            f"{dotted(key)} is set, but {dotted(engine)} is none, so that "
            "nothing runs in a container"
        )
        notes.note("R39", message, key, f"{dotted(engine)}=pyxis, or apptainer", needs=[engine])
