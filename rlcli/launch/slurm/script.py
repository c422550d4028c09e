"""The batch script of a job: its Slurm options and how it starts its run, as plain text."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import UsageError
from rlcli.recipe.sections.launch import OF_JOB, OF_NODES, JobPart, Nodes

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe
    from rlcli.recipe.sections.launch import Slurm
    from rlcli.topology import Topology

TEMPLATE = Path(__file__).with_name("job.sbatch.j2")
CORES_PER_GPU = 8
CORES_PER_WORKER = 2
"""CPU cores per worker in a job without GPUs."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def batch_script(
    recipe: Recipe,
    topology: Topology,
    *,
    values: Path,
    log: Path,
    lead: int,
    runs: int = 1,
    at_once: int | None = None,
) -> str:
    """The text for `sbatch`. `values`: the file that lists the runs; `log`: the script's log file;
    `lead`: how many seconds before the time limit it is warned; `runs`: more than one form an
    array, of which `at_once` may run at a time. Raises UsageError for a template that cannot be
    used."""
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    settings = recipe.launch.slurm
    template = Path(settings.template).expanduser() if settings.template else TEMPLATE
    # a recipe names it, and a job that is only looked at runs nothing of a recipe
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    try:
        return environment.from_string(template.read_text()).render(
            title=_title(recipe, topology, runs),
            parts=[list(options) for options in _parts(recipe, topology, lead, runs, at_once)],
            lead=lead,
            modules=settings.modules,
            setup=settings.setup,
            log=str(log),  # a path could be written to
            python=sys.executable,
            values=str(values),
        )
    except (OSError, UnicodeDecodeError, OverflowError, TemplateError) as error:
        message = f"the template {template} cannot be used: {error}"
        raise UsageError(
            message, where="launch.slurm.template", hint=f"the default is {TEMPLATE}"
        ) from None


def seconds_of(time: str) -> int:
    """Seconds of a time limit: `90m`, `8h`, `2d`, or in Slurm's notation: minutes, `8:00` (8
    minutes), `8:00:00`, `2-0`. Raises UsageError for less than a minute, which is Slurm's unit."""
    if short := re.fullmatch(r"(\d+)([smhd])", time):
        seconds = int(short[1]) * _UNITS[short[2]]
    else:
        days, dash, rest = time.rpartition("-")
        parts = [int(figure) for figure in rest.split(":")]
        units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
        seconds = int(days or 0) * 86400 + sum(
            figure * unit for figure, unit in zip(parts, units, strict=False)
        )
    if seconds < 60:
        message = f"a job of {seconds} s is too short: Slurm counts in minutes"
        raise UsageError(message, where="launch.slurm.time", hint="write 90m, 8h, 2d or 8:00:00")
    return seconds


def parts_of(recipe: Recipe) -> list[JobPart]:
    """The parts of a job with all their settings; one part, unless the job is heterogeneous."""
    settings = recipe.launch.slurm
    parts = settings.parts or [JobPart(nodes=recipe.cluster.nodes)]
    inherited = {name: getattr(settings, name) for name in Nodes.model_fields}
    return [JobPart(**inherited | section.model_dump(exclude_none=True)) for section in parts]


def _title(recipe: Recipe, topology: Topology, runs: int) -> str:
    nodes = "one node" if topology.nodes == 1 else f"{topology.nodes} nodes"
    workers = (
        "one worker" if topology.devices_per_node == 1 else f"{topology.devices_per_node} workers"
    )
    each = "" if topology.nodes == 1 else " each"
    return (
        f"{f'{runs} runs' if runs > 1 else 'A run'} of {recipe.name}, on {nodes} "
        f"with {workers}{each}."
    )


def _parts(
    recipe: Recipe, topology: Topology, lead: int, runs: int, at_once: int | None
) -> Iterator[Iterator[str]]:
    """Options of sbatch for each part of the job, without their dashes;
    those of the whole job go with the first."""
    first, *others = parts_of(recipe)
    if others and runs > 1:
        message = "a sweep is an array of jobs, and Slurm has no arrays of heterogeneous jobs"
        raise UsageError(
            message, where="launch.slurm.parts", hint="submit the runs one by one", code="R49"
        )
    settings = recipe.launch.slurm
    of_job = [f"job-name={recipe.name}"]
    if runs > 1:
        limit = f"%{at_once}" if at_once else ""
        of_job.append(f"array=0-{runs - 1}{limit}")
    yield itertools.chain(
        of_job,
        _of_part(first, settings, topology),
        _named(settings, OF_JOB),
        [f"signal=B:USR1@{lead}", "requeue"],
    )
    yield from (_of_part(section, settings, topology) for section in others)


def _of_part(section: JobPart, settings: Slurm, topology: Topology) -> Iterator[str]:
    each = CORES_PER_WORKER if topology.device == "cpu" else CORES_PER_GPU
    cores = section.cpus_per_task or each * topology.devices_per_node
    yield from (f"nodes={section.nodes}", "ntasks-per-node=1", f"cpus-per-task={cores}")
    if section.gres is None and topology.device != "cpu":
        yield f"gpus-per-node={topology.devices_per_node}"
    if settings.time is not None:
        yield f"time={_slurm_time(seconds_of(settings.time))}"
    yield from _named(section, OF_NODES)
    yield from _raw_options(settings)


def _named(settings: Nodes, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if (value := getattr(settings, name)) is not None:
            yield f"{name.replace('_', '-')}={value}"


def _raw_options(settings: Slurm) -> Iterator[str]:
    for name, value in settings.options.items():
        if value is True:
            yield name
        elif value is not False:
            yield (
                f'{name}="{value}"'
                if isinstance(value, str) and re.search(r"[\s#']|^$", value)
                else f"{name}={value}"
            )


def _slurm_time(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
