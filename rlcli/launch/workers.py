"""The workers of a recipe, started by the launcher that it names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.api.headway import doing
from rlcli.errors import HangError
from rlcli.launch.stacks import where_ranks_are
from rlcli.open_files import (
    OF_A_PROCESS,
    needed_by_master,
    needed_by_rank,
    raise_limit,
    too_few,
)
from rlcli.topology.groups import process_groups

if TYPE_CHECKING:
    from rlcli.launch.launcher import Launcher, Running
    from rlcli.recipe.schema import Recipe
    from rlcli.topology import Topology

LEAVE_WITHIN = 60.0
"""Seconds that dismissed processes may take to exit."""


@contextmanager
def workers(recipe: Recipe, topology: Topology, run_dir: Path) -> Iterator[Running]:
    """Workers of a recipe, in this process or in others that log to the run's folder."""
    _check_open_files(recipe, topology)
    with doing("starting the ranks"):
        running = launcher_of(recipe, topology).start(process_groups(recipe, topology), run_dir)
    try:
        yield running
    except HangError as error:
        running.stop(0, show_stacks=True)
        if locations := where_ranks_are(run_dir / "logs", range(topology.world_size)):
            raise HangError(
                error.what + locations, where=error.where, hint=error.hint, code=error.code
            ) from error
        raise
    except BaseException:
        running.stop(0)
        raise
    running.stop(LEAVE_WITHIN)


def _check_open_files(recipe: Recipe, topology: Topology) -> None:
    """Raise the limit on open files for this process and those that it starts. Raises ResourceError
    F61 if it remains too low for the run; agents on other nodes report their own."""
    from rlcli.topology.groups import lanes_of

    limit = raise_limit()
    needed = {"the process of the run": OF_A_PROCESS}
    if recipe.launch.type != "inline":
        lanes = sum(map(len, lanes_of(recipe, topology).values()))
        needed = {"the master": needed_by_master(recipe.cluster.nodes, topology.world_size, lanes)}
    if recipe.launch.type == "local":
        needed["a rank"] = needed_by_rank(topology.world_size)
    who = max(needed, key=lambda process: needed[process])
    if limit < needed[who]:
        raise too_few(limit, needed[who], who)


def launcher_of(recipe: Recipe, topology: Topology) -> Launcher:
    if recipe.launch.type == "inline":
        from rlcli.launch.inline import InlineLauncher

        return InlineLauncher(recipe, topology)
    if recipe.launch.type == "slurm":
        from rlcli.launch.slurm.launcher import SlurmLauncher

        return SlurmLauncher(recipe)
    from rlcli.launch.local import LocalLauncher

    return LocalLauncher(recipe)
