"""`rlcli plan`: who computes what, in which order, on which devices."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli.recipe_arguments import Overrides, RecipeName, With, load

if TYPE_CHECKING:
    from rlcli.recipe.schema import Call, Recipe, Role
    from rlcli.topology import Topology


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show worker groups, ranks, meshes, the graph and the batch arithmetic of a recipe, without starting it.

    Example: rlcli plan ppo_math launch=local cluster.devices_per_node=2
    """
    from rlcli.cli.output import print_json, print_text
    from rlcli.recipe.warm_start import chain
    from rlcli.topology import plan_topology

    resolved = load(recipe, overrides, with_)
    topology = plan_topology(resolved.recipe)
    first = [source.recipe.name for source in chain(resolved)]
    if as_json:
        print_json(_as_json(resolved.recipe, topology, first))
        return
    cluster = f"{_count(topology.nodes, 'node')} x {_count(topology.devices_per_node, 'device')}"
    print_text(f"{resolved.recipe.name} · {cluster} ({topology.device}) · launch {topology.launch}")
    if first:
        print_text("runs after " + " → ".join(first) + ", whose results it starts from")
    print_text()
    _print_roles(resolved.recipe, topology)
    _print_calls(resolved.recipe)
    print_text("step")
    for line in topology.batch.lines():
        print_text(f"  {line}")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _print_roles(recipe: Recipe, topology: Topology) -> None:
    from rlcli.cli.output import print_table

    rows = []
    for group in topology.groups:
        for role in group.roles:
            section = recipe.models[role]
            assert section.backend is not None
            mesh = str(topology.placement(role).mesh)
            trained = "trained" if role in recipe.trained_roles else ""
            rows.append([role, ranks_text(group.ranks), mesh, section.backend.type, trained, weights_text(section)])
    print_table(["role", "ranks", "mesh", "backend", "", "weights"], rows)


def _print_calls(recipe: Recipe) -> None:
    from rlcli.cli.output import print_table
    from rlcli.recipe.graph import stages

    for title, calls in (("graph", recipe.graph), ("evaluation", recipe.train.eval.graph)):
        rows = [
            [str(number), name, f"{call.model}.{call.call}", call.interface.type, _keys_text(call)]
            for number, stage in enumerate(stages(calls), start=1)
            for name, call in ((name, calls[name]) for name in stage)
        ]
        if rows and (title == "graph" or recipe.train.eval.dataset is not None):
            print_table(["", "call", "model", "interface", "makes"], rows, title=title)


def _keys_text(call: Call) -> str:
    return ", ".join(call.output_key_remap.get(key, key) for key in call.outputs)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`0-3,5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def weights_text(role: Role) -> str:
    """Where a role's weights come from."""
    if role.scratch is not None:
        return f"random {role.scratch.get('model_type')}"
    if role.init is not None:
        return f"those of {role.init}" + (", value head" if role.head == "value" else "")
    return role.path or "none"


def _as_json(recipe: Recipe, topology: Topology, first: list[str]) -> dict[str, Any]:
    from rlcli.recipe.graph import stages

    batch = asdict(topology.batch) | {"sequences": topology.batch.sequences, "lines": topology.batch.lines()}
    return {
        "recipe": recipe.name,
        "runs_first": first,
        "nodes": topology.nodes,
        "devices_per_node": topology.devices_per_node,
        "world_size": topology.world_size,
        "device": topology.device,
        "launch": topology.launch,
        "roles": [
            {
                "role": placement.role,
                "ranks": list(placement.ranks),
                "mesh": asdict(placement.mesh),
                "backend": recipe.models[placement.role].backend.type,  # type: ignore[union-attr]
                "trained": placement.role in recipe.trained_roles,
                "weights": weights_text(recipe.models[placement.role]),
            }
            for placement in topology.placements
        ],
        "groups": [{"ranks": list(group.ranks), "roles": list(group.roles)} for group in topology.groups],
        "stages": stages(recipe.graph),
        "batch": batch,
    }
