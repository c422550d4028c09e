"""Which layouts an engine can run: the contract by which a recipe is refused before it starts. No
torch here.

A backend declares a function, which is read without importing the backend's file:

    LAYOUT: ClassVar[str] = "_my_layouts.problems"

names `problems` in `_my_layouts.py`, a file next to the backend's that does not import torch. It
takes a `RoleLayout` and returns what its engines cannot do of it, beyond `DIMENSIONS`.
`WHOLE_SEQUENCES` names another one, of an engine that can compute the common prefix of several
sequences once: it returns why this is not done in a layout, or None if it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlcli.api.architecture import Architecture


@dataclass(frozen=True)
class RoleLayout:
    """A role on its mesh."""

    role: str
    mesh: Mapping[str, int]
    """Size of every dimension: dp, tp, pp, cp, ep."""
    arguments: Mapping[str, Any]
    """The backend's arguments, including defaults."""
    device: str
    """Kind of its devices: cuda, cpu or auto."""
    sizes: Architecture | None = None
    """None: unknown."""


@dataclass(frozen=True)
class LayoutProblem:
    """Why an engine does not support a layout."""

    message: str
    key: tuple[str, ...]
    """The key of the role that is at fault."""
    value: str | None = None
    """A value of this key for which the mesh need not change."""


def undivided(layout: RoleLayout) -> Iterator[LayoutProblem]:
    """Heads, blocks and experts that ranks cannot share equally, whatever the backend."""
    sizes, mesh, role = layout.sizes, layout.mesh, f"models.{layout.role}"
    if sizes is None:
        return
    yield from _undivided_heads(sizes, mesh["tp"], role)
    blocks = len(sizes.layers)
    if blocks % mesh["pp"]:
        message = f"the {blocks} blocks of {role} cannot be divided among {mesh['pp']}"
        yield LayoutProblem(f"{message} pipeline stages", ("mesh", "pp"))
    if mesh["ep"] > 1 and (not sizes.experts or sizes.experts % mesh["ep"]):
        message = f"{role} has {sizes.experts or 'no'} experts, which cannot be divided among"
        yield LayoutProblem(f"{message} {mesh['ep']} expert-parallel ranks", ("mesh", "ep"))


def _undivided_heads(sizes: Architecture, ranks: int, role: str) -> Iterator[LayoutProblem]:
    for kind, heads in (("attention", sizes.heads), ("key-value", sizes.kv_heads)):
        if heads % ranks:
            message = f"the {heads} {kind} heads of {role} cannot be divided among {ranks}"
            yield LayoutProblem(f"{message} tensor-parallel ranks", ("mesh", "tp"))
            return
