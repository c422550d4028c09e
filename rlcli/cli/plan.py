"""`rlcli plan`: devices, execution order, batch sizes, memory and disk,
without running anything."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli.arguments import AsJson, Overrides, RecipeName, With, load
from rlcli.cli.output import print_json, print_talk, print_text
from rlcli.errors import ResourceError, UsageError, raise_all
from rlcli.project import search_paths_kept
from rlcli.recipe.mesh import MAX_DEVICES_PER_NODE, MAX_NODES

if TYPE_CHECKING:
    from rlcli.topology.report import Plan


@search_paths_kept()
def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", metavar="N", min=1, max=MAX_NODES, help="Plan for this many nodes."
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            metavar="N",
            min=1,
            max=MAX_DEVICES_PER_NODE,
            help="Plan for this many devices per node.",
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory",
            metavar="GIB",
            help="Report what fits on such a device, and what would help.",
        ),
    ] = None,
    graph: Annotated[
        bool,
        typer.Option(
            "--graph",
            help="Show what each call reads and writes.",
        ),
    ] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Show the calls of a few steps as a timeline.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show what each role holds in memory.")
    ] = False,
    layouts: Annotated[
        bool,
        typer.Option("--layouts", help="Compare layouts by memory and messages; recommend one."),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit with code 6 unless memory and disk suffice."),
    ] = False,
    commands: Annotated[
        bool, typer.Option("--commands", help="Print the command for each node instead.")
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", metavar="DIR", help="For --commands: folder of the run."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show each role's devices, batch sizes, memory and disk; start nothing.

    Example: rlcli plan ppo_math launch=local cluster.devices_per_node=2 --device-memory 80
    """
    from rlcli.inspect.doubtful import recipe_warnings
    from rlcli.topology.layouts import layout_errors
    from rlcli.topology.memory import GIB
    from rlcli.topology.report import make_plan, plan_json

    if strict and device_memory is None:
        raise UsageError(
            "--strict needs the memory of a device", hint="for example --device-memory 80"
        )
    gib = _gib(device_memory) if device_memory is not None else None
    resolved = load(recipe, overrides, with_)
    topology_plan = make_plan(
        resolved, round(gib * GIB) if gib is not None else None, nodes, devices
    )
    raise_all(layout_errors(topology_plan.resolved))
    if commands:
        _print_commands(topology_plan, recipe, tuple(with_ or ()), run_dir, as_json)
    elif as_json:
        print_json(plan_json(topology_plan, layouts))
    else:
        from rlcli.topology.text import plan_lines

        for line in plan_lines(topology_plan, graph, timeline, memory, layouts):
            print_text(line)
        for warning in recipe_warnings(resolved):
            print_talk(f"warning: {warning}")
    if strict and topology_plan.shortfalls:
        for shortfall in topology_plan.shortfalls:
            print_talk(f"does not fit: {shortfall}")
        raise typer.Exit(ResourceError.exit_code)


def _gib(text: str) -> float:
    """A size such as `80`, `80GB` or `79.6 GiB`; a GPU's GB are GiB. Raises UsageError."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:GI?B?)?", text.strip(), re.IGNORECASE)
    if size is None or not 0 < float(size[1]) < 1e6:
        raise UsageError(
            f"--device-memory is {text}; it must be a number of GiB", hint="for example 80"
        )
    return float(size[1])


def _print_commands(
    topology_plan: Plan,
    recipe: str,
    profiles: tuple[str, ...],
    run_dir: Path | None,
    as_json: bool,
) -> None:
    """The command for each node, with the plan in JSON."""
    from rlcli.api.network import LOOPBACK
    from rlcli.launch.commands import command_lines, node_commands
    from rlcli.launch.interfaces import interface_of
    from rlcli.topology.report import plan_json

    commands = node_commands(
        topology_plan.resolved, topology_plan.topology, recipe, profiles, run_dir
    )
    if as_json:
        plain = [asdict(command) for command in commands]
        print_json(plan_json(topology_plan) | {"commands": plain})
        return
    # that of a job is known on its nodes
    interface = interface_of(topology_plan.recipe) if len(commands) > 1 else LOOPBACK
    for line in command_lines(commands, interface):
        print_text(line)
