"""The layouts in which a backend's ranks are tried: the first that it supports, or all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcli.recipe.mesh import Mesh

Layout = tuple[Mapping[str, int], Mapping[str, Any]]
"""A mesh, and settings of the backend."""

ULYSSES, RING = {"context_parallel": "ulysses"}, {"context_parallel": "ring"}
VIRTUAL_STAGES = {"virtual_stages": 2}
LAYOUTS: tuple[Layout, ...] = (
    ({"dp": 2}, {}),
    ({"tp": 2}, {}),
    ({"pp": 2}, {}),
    ({"dp": 2, "tp": 2}, {}),
    ({"pp": 2, "tp": 2}, {}),
    ({"cp": 2, "tp": 2}, ULYSSES),
    ({"dp": 2, "cp": 2}, RING),
    ({"cp": 4}, ULYSSES),  # more ranks than key heads
)
WITH_EXPERTS: tuple[Layout, ...] = (
    ({"dp": 2, "ep": 2}, {}),
    ({"dp": 4, "ep": 2}, {}),
    ({"cp": 2, "ep": 2}, ULYSSES),
    ({"dp": 2, "cp": 2, "ep": 2}, RING),
    ({"dp": 2, "pp": 2, "ep": 2}, {}),
    ({"dp": 2, "tp": 2, "ep": 2}, {}),
)
"""Of a model with experts."""
WITH_VIRTUAL_STAGES: tuple[Layout, ...] = (
    ({"pp": 2}, VIRTUAL_STAGES),
    ({"dp": 2, "pp": 2}, VIRTUAL_STAGES),
)
"""Of a model with a layer for every virtual stage."""
OF_TWO: tuple[Layout, ...] = (
    ({"dp": 2}, {}),
    ({"pp": 2}, {}),
    ({"dp": 2, "ep": 2}, {}),
    ({"cp": 2}, ULYSSES),
    ({"cp": 2}, RING),
    ({"cp": 2, "ep": 2}, ULYSSES),
    ({"tp": 2}, {"gradient_checkpointing": True, "recompute": "selective"}),
)
"""Of two ranks and a model with experts, for the paths of its routers."""

ALONE = "one rank"


def layout_name(degrees: Mapping[str, int], settings: Mapping[str, Any]) -> str:
    """`dp 2`, or `cp 2 ring`."""
    names = (f"{name} {degree}" for name, degree in degrees.items())
    return " ".join([*names, *map(str, settings.values())]) or ALONE


def ranks_in(degrees: Mapping[str, int]) -> int:
    """The number of ranks; expert-parallel ones are data-parallel ones."""
    return Mesh(**degrees).size
