"""The topology as a picture in text: a cell for each device, a line for each role."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe, Role
    from rlcli.topology.placement import Topology

TRAINED, HELD, PLAIN, EMPTY = "■", "□", "○", "·"
CELLS_OF_A_BLOCK = 34
"""Columns for cells: they and what is next to them must fit into 80."""
MOST_CELLS = 16
"""Most devices per node that are drawn as a cell each; beyond that they are counted."""


@dataclass(frozen=True)
class _Nodes:
    """Neighbouring nodes that hold the same roles on the same devices."""

    first: int
    last: int

    @property
    def title(self) -> str:
        return (
            f"node {self.first}" if self.first == self.last else f"nodes {self.first}-{self.last}"
        )


def draw(recipe: Recipe, topology: Topology) -> list[str]:
    """Lines of at most 80 columns, unless long names make that impossible."""
    width = max(len(name) for name in recipe.models)
    lines: list[str] = []
    blocks = list(_blocks(topology, _node_groups(topology)))
    for block in blocks:
        lines += [""] if lines else []
        lines += _block_lines(recipe, topology, block, width, described=block is blocks[-1])
    return [*lines, f"{'':{width}}  {_legend(lines)}"]


def _legend(lines: Sequence[str]) -> str:
    meanings = {TRAINED: "trained", HELD: "only read", PLAIN: "no weights", EMPTY: "absent"}
    return "   ".join(
        f"{sign} {meaning}"
        for sign, meaning in meanings.items()
        if any(sign in line for line in lines)
    )


def _node_groups(topology: Topology) -> list[_Nodes]:
    def pattern(node: int) -> tuple[tuple[str, ...], ...]:
        first = node * topology.devices_per_node
        return tuple(
            topology.roles_on(first + device) for device in range(topology.devices_per_node)
        )

    groups = [list(nodes) for _, nodes in groupby(range(topology.nodes), pattern)]
    return [_Nodes(nodes[0], nodes[-1]) for nodes in groups]


def _blocks(topology: Topology, groups: Sequence[_Nodes]) -> Iterable[list[_Nodes]]:
    """As many nodes side by side as fit."""
    block: list[_Nodes] = []
    for nodes in groups:
        if (
            block
            and sum(_cell_width(topology, other_nodes) + 3 for other_nodes in (*block, nodes))
            > CELLS_OF_A_BLOCK
        ):
            yield block
            block = []
        block.append(nodes)
    yield block


def _cell_width(topology: Topology, nodes: _Nodes) -> int:
    return max(len(nodes.title), len(_ranks_title(topology, nodes)), _cells_length(topology))


def _cells_length(topology: Topology) -> int:
    devices = topology.devices_per_node
    return devices if devices <= MOST_CELLS else len(f"{devices} x {TRAINED}")


def _ranks_title(topology: Topology, nodes: _Nodes) -> str:
    first, last = (
        nodes.first * topology.devices_per_node,
        (nodes.last + 1) * topology.devices_per_node - 1,
    )
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _block_lines(
    recipe: Recipe, topology: Topology, block: Sequence[_Nodes], width: int, *, described: bool
) -> list[str]:
    titles = (lambda nodes: nodes.title), (lambda nodes: _ranks_title(topology, nodes))
    lines = [
        " " * (width + 2)
        + "   ".join(f"{title(nodes):{_cell_width(topology, nodes)}}" for nodes in block)
        for title in titles
    ]
    for role in recipe.models:
        cells = "   ".join(
            f"{_cells(recipe, topology, nodes, role):{_cell_width(topology, nodes)}}"
            for nodes in block
        )
        lines.append(
            f"{role:{width}}  {cells}"
            + (f"   {_about(recipe, topology, role)}" if described else "")
        )
    return [line.rstrip() for line in lines]


def _cells(recipe: Recipe, topology: Topology, nodes: _Nodes, role: str) -> str:
    sign = (
        TRAINED
        if role in recipe.trained_roles
        else HELD
        if recipe.models[role].has_weights
        else PLAIN
    )
    first = nodes.first * topology.devices_per_node
    is_on_device = [
        role in topology.roles_on(first + device) for device in range(topology.devices_per_node)
    ]
    if topology.devices_per_node <= MOST_CELLS:
        return "".join(sign if is_here else EMPTY for is_here in is_on_device)
    return f"{sum(is_on_device)} x {sign}" if any(is_on_device) else EMPTY


def _about(recipe: Recipe, topology: Topology, role: str) -> str:
    section = recipe.models[role]
    if not section.has_weights:
        return ""
    widest = max(len(str(placement.mesh)) for placement in topology.placements)
    words = [f"{topology.placement(role).mesh!s:{widest}}", section.engine.type]
    calls = [call for call in recipe.graph.values() if call.model == role]
    kinds = {call.call for call in calls}
    marks = [
        mark for mark, kind in (("generate", "generate"), ("train", "train_step")) if kind in kinds
    ]
    if any(call.hooks.offload for call in calls):
        marks.append("offload")
    return "  ".join([*words, "+".join(marks)]).rstrip()


def weights_text(role: Role) -> str:
    """Where a role's weights come from."""
    if role.scratch is not None:
        return f"random {role.scratch.get('model_type')}"
    if role.init is not None:
        return f"same as {role.init}" + (", value head" if role.head == "value" else "")
    return role.path or "none"


def ranks_text(ranks: Sequence[int]) -> str:
    """`0-3,5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
