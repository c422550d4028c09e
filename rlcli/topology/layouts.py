"""Layouts of a role: whether its engine can run them, what they take and send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlcli.errors import ModelError
from rlcli.recipe.layouts import layout_problems, what_it_can
from rlcli.recipe.mesh import DevicesError
from rlcli.topology.configs import architecture_of
from rlcli.topology.placement import plan_topology

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved


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
        known = None if isinstance(sizes, str) else sizes
        for problem in layout_problems(recipe, name, mesh, known):
            where = str(resolved.origin(("models", name, *problem.key)))
            hint = what_it_can(recipe, name, mesh, problem, known)
            yield ModelError(problem.message, where=where, hint=hint, code="R49")
