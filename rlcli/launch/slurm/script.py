"""A Slurm job script from a recipe and its topology: text, and nothing but text."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import UsageError
from rlcli.project import current_project

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved
    from rlcli.topology import Topology

TEMPLATE = Path(__file__).with_name("job.sbatch.j2")
CORES_PER_GPU = 8
CORES_PER_WORKER = 2
"""Of a job without GPUs."""
LONGEST_WARNING = 900
"""Seconds before its end that a job is told: a step and a checkpoint must fit in."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SLURM_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):([0-5]?\d):([0-5]?\d)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,@+-]{0,127}")


@dataclass(frozen=True)
class Job:
    """What Slurm is asked for beside the recipe's devices."""

    time: str = "8h"
    """`90m`, `8h`, `2d`, or as Slurm writes it: `8:00:00`, `2-0:00:00`."""
    partition: str | None = None
    account: str | None = None
    rlcli: Sequence[str] = field(default_factory=lambda: (sys.executable, "-m", "rlcli"))
    """The command on the cluster: by default this Python's."""
    folder: Path = field(default_factory=Path.cwd)
    """Where the job runs."""


def job_script(resolved: Resolved, topology: Topology, job: Job, recipe: str, with_: Sequence[str] = ()) -> str:
    """The text for `sbatch`; `recipe` and `with_` are names or files as the user gave them. Raises UsageError."""
    from jinja2 import Environment, StrictUndefined

    if topology.nodes > 1:
        raise UsageError(
            f"the recipe is laid out on {topology.nodes} nodes; this version launches on one",
            hint="set cluster.nodes=1 and as many cluster.devices_per_node as a node has",
        )
    seconds = _seconds(job.time)
    is_cpu = topology.device == "cpu"
    cores = CORES_PER_WORKER if is_cpu else CORES_PER_GPU
    project = current_project()
    layers = [part for layer in with_ for part in ("--with", place_of(layer, job.folder))]
    arguments = [*layers, "--", place_of(recipe, job.folder), *resolved.overrides]
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(TEMPLATE.read_text())
    return template.render(
        name=resolved.recipe.name,
        job_name=f"rlcli-{resolved.recipe.name}",
        nodes=topology.nodes,
        devices=topology.devices_per_node,
        gpus=0 if is_cpu else topology.devices_per_node,
        cpus=cores * topology.devices_per_node,
        threads=cores,
        time=_slurm_time(seconds),
        warning=min(LONGEST_WARNING, seconds // 4),
        partition=_name("partition", job.partition),
        account=_name("account", job.account),
        folder=shlex.quote(str(job.folder)),
        project=shlex.quote(str(project)) if project is not None else "",
        runs=shlex.quote(str(Path(resolved.recipe.log.dir).expanduser() / resolved.recipe.name)),
        rlcli=shlex.join(job.rlcli),
        arguments=shlex.join(arguments),
    )


def place_of(name: str, folder: Path) -> str:
    """A file by its whole path, a name as it is."""
    return next((str((folder / file).resolve()) for file in (name, f"{name}.yaml") if (folder / file).is_file()), name)


def _name(what: str, value: str | None) -> str:
    if value is not None and not _NAME.fullmatch(value):
        raise UsageError(f"--{what} is {value!r}, which is not a valid name", hint="sinfo and sacctmgr list them")
    return value or ""


def _seconds(text: str) -> int:
    """The time limit. Raises UsageError."""
    short = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if short:
        seconds = int(short[1]) * _UNITS[short[2]]
    elif match := _SLURM_TIME.fullmatch(text):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        seconds = days * 86400 + hours * 3600 + minutes * 60 + rest
    else:
        raise UsageError(f"--time is {text!r}, which is not a time", hint="write 90m, 8h, 2d or 8:00:00")
    if seconds < 60:
        raise UsageError(f"--time is {text}; Slurm counts in minutes", hint="write 90m, 8h, 2d or 8:00:00")
    return seconds


def _slurm_time(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
