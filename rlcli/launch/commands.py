"""The command to type on each node of a run: text without secrets."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.api.network import LOOPBACK
from rlcli.launch.node import agent_command
from rlcli.project import VARIABLE, current_project
from rlcli.topology.groups import process_groups
from rlcli.units import count

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved
    from rlcli.topology import Topology

BY_HAND = "launch.by_hand=true"
WIDTH = 80
WORD = re.compile(r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+")
"""A word of a shell command, with its quotes."""


@dataclass(frozen=True)
class NodeCommand:
    """The command that starts one node, or all of them."""

    node: int | None
    """None: all nodes."""
    ranks: tuple[int, ...]
    command: str
    about: str
    """Explanation for whoever types it."""


def node_commands(
    resolved: Resolved,
    topology: Topology,
    recipe: str,
    with_: Sequence[str] = (),
    run_dir: Path | None = None,
) -> list[NodeCommand]:
    """One command for each node, the first of which starts the run; or one that submits it as a
    job. `recipe` and `with_` are as the user gave them; `run_dir`: the folder that all nodes share,
    by default a new one."""
    run_dir = (run_dir or _new_folder(resolved)).absolute()
    is_job = topology.launch == "slurm"
    has_nodes = topology.nodes > 1 and not is_job
    train = _train(resolved, recipe, with_, run_dir, has_nodes)
    if is_job:
        return [_submission(topology, train)]
    (ranks,) = (
        group for group in process_groups(resolved.recipe, topology) if group.kind == "ranks"
    )
    deadline = resolved.recipe.launch.startup_deadline
    about = (
        f"waits for the others, up to {deadline:g} s (launch.startup_deadline)"
        if has_nodes
        else "there is no other node"
    )
    commands = [NodeCommand(0, ranks.on_node(0), train, f"and the master; {about}")]
    for node in range(1, topology.nodes):
        command = _with_project(agent_command(run_dir, node), current_project())
        commands.append(
            NodeCommand(node, ranks.on_node(node), command, "must see the same run folder")
        )
    return commands


def _submission(topology: Topology, command: str) -> NodeCommand:
    about = f"submits one job, which starts them on {count(topology.nodes, 'node')}"
    return NodeCommand(None, tuple(range(topology.world_size)), command, about)


def _train(
    resolved: Resolved, recipe: str, with_: Sequence[str], run_dir: Path, by_hand: bool
) -> str:
    """The command that starts the run, or submits it; `by_hand`: other nodes have theirs."""
    folder = Path.cwd()
    layers = [word for layer in with_ for word in ("--with", place_of(layer, folder))]
    overrides = [*resolved.overrides]
    if by_hand and BY_HAND not in overrides:
        overrides.append(BY_HAND)
    train = [sys.executable, "-P", "-m", "rlcli", "train", "--run-dir", str(run_dir), *layers]
    train += ["--", place_of(recipe, folder), *overrides]
    return f"cd {shlex.quote(str(folder))} && {_with_project(train, current_project())}"


def command_lines(commands: Sequence[NodeCommand], interface: str) -> list[str]:
    """The printed lines: comments and commands that can be pasted into a shell."""
    lines = []
    for command in commands:
        first, last = command.ranks[0], command.ranks[-1]
        ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
        where = "" if command.node is None else f"node {command.node}: "
        lines += [*_comment(f"{where}{ranks}; {command.about}"), *_shell_lines(command.command), ""]
    if len(commands) > 1 and interface == LOOPBACK:
        lines += _comment(
            "launch.interface is lo, so all nodes are on one machine; name the interface between "
            "your machines"
        )
    return lines if lines[-1] else lines[:-1]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="#   ")


def _shell_lines(command: str) -> list[str]:
    """A command in lines that end with a backslash, broken between its words only. A line break
    within quotes leaves it as it is."""
    if "\n" in command:
        return [command]
    lines = [""]
    for word in WORD.findall(command):
        if lines[-1] and len(lines[-1]) + len(word) + 3 > WIDTH:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return lines


def place_of(name: str, folder: Path) -> str:
    """The absolute path of a file; a name as it is."""
    return next(
        (
            str((folder / file).resolve())
            for file in (name, f"{name}.yaml")
            if (folder / file).is_file()
        ),
        name,
    )


def _with_project(command: Sequence[str], project: Path | None) -> str:
    """Add the project to a command, so that it finds the same components."""
    return shlex.join(
        ["env", f"{VARIABLE}={project}", *command] if project is not None else command
    )


def _new_folder(resolved: Resolved) -> Path:
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(resolved.recipe.log.dir).expanduser() / resolved.recipe.name / now
