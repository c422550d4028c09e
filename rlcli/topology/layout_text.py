"""What a plan says about layouts: the recipe's own, and others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlcli.recipe.engine_layouts import mesh_overrides
from rlcli.topology.layouts import (
    PlannedLayout,
    best_layout,
    planned_layout,
    planned_layouts,
    trained_calls,
)
from rlcli.topology.text_format import aligned, size, wrapped

if TYPE_CHECKING:
    from rlcli.recipe.mesh import Mesh
    from rlcli.topology.report import Plan


def message_lines(plan: Plan) -> Iterator[str]:
    """What the recipe's own layouts send, where they have several ranks."""
    texts: dict[str, list[str]] = {}
    for role in trained_calls(plan.recipe):
        layout = planned_layout(plan, role, plan.topology.placement(role).mesh)
        sent = [f"{_sent(layout)} sent per update"] if layout.sent else []
        idle = [f"stages idle for {layout.idle:.0%} of it"] if layout.idle else []
        if sent or idle:
            texts.setdefault(", ".join([*sent, *idle]), []).append(role)
    for text, roles in texts.items():
        yield from wrapped(f"{', '.join(roles)}: {text}", "  ", "    ")


def layout_lines(plan: Plan) -> Iterator[str]:
    """The layouts of each trained role as a table, and the best one."""
    for role in trained_calls(plan.recipe):
        layouts = planned_layouts(plan, role)
        mesh = plan.topology.placement(role).mesh
        yield ""
        yield f"layouts of {role}, fastest first (* as in the recipe); sent per rank and update"
        head = ["layout", "memory", "idle", *(["verdict"] if plan.device_bytes else []), "sent"]
        yield from aligned(head, [_layout(plan, layout, mesh) for layout in layouts], right=(1, 2))
        best = best_layout(plan, layouts)
        if best is None:
            yield "  none of them is known to fit into the memory of these devices"
        elif best.mesh == mesh:
            yield "  the recipe's own is the fastest" + (" that fits" if plan.device_bytes else "")
        else:
            yield from wrapped(f"advised: {mesh_overrides(role, best.mesh, mesh)}", "  ", "    ")


def _layout(plan: Plan, layout: PlannedLayout, mesh: Mesh) -> list[str]:
    """A row; `mesh` is that of the recipe."""
    mark = " *" if layout.mesh == mesh else ""
    total = size(layout.peak.total) if layout.peak else "?"
    row = [f"{layout.mesh}{mark}", total, f"{layout.idle:.0%}"]
    if plan.device_bytes:
        row.append(plan.verdict(layout.peak) if layout.peak else "?")
    return [*row, _sent(layout) or "-"]


def _sent(layout: PlannedLayout) -> str:
    return ", ".join(f"{kind} {size(count)}" for kind, count in layout.sent.items())
