"""Submits runs to Slurm: their folders, the batch script with its values next to it,
and `sbatch`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.errors import ResourceError, UsageError
from rlcli.files import make_folder, replace_file
from rlcli.launch.slurm.allocations import lead_of
from rlcli.launch.slurm.commands import SlurmError, ask_slurm
from rlcli.launch.slurm.job import LOG
from rlcli.launch.slurm.jobs import JOB_ID, Submission, look_up_one, of_cluster
from rlcli.launch.slurm.script import batch_script, parts_of, seconds_of
from rlcli.launch.sweep import Sweep, open_sweep
from rlcli.project import VARIABLE, current_project

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe

SCRIPT, VALUES = "job.sbatch", "job-values.json"
"""Files in the folder of the run or the sweep."""
ARRAY_LOG = "job.log"
"""File in the folder of a sweep: output of its script before a run begins."""
LONGEST_LEAD = 65535
"""Most seconds before the end of a job at which Slurm can signal it. A run that needs more warns
itself."""


@dataclass(frozen=True)
class JobArray:
    """A job, or an array of jobs: one for each run."""

    recipe: Recipe
    folder: Path
    """The folder of the run or the sweep, which holds the script."""
    runs: tuple[Path, ...]
    options: tuple[str, ...] = ()
    """Options for each run's `resume`, in addition to its folder."""
    overrides: tuple[str, ...] = ()
    """New values for each run's `resume`."""
    at_once: int | None = None
    """How many runs of an array may run at a time."""

    def script(self) -> str:
        """The text for `sbatch`. Raises UsageError."""
        from rlcli.topology import plan_topology

        settings = self.recipe.launch.slurm
        limit = seconds_of(settings.time) if settings.time else _limit_of_partitions(self.recipe)
        return batch_script(
            self.recipe,
            plan_topology(self.recipe),
            values=self.folder / VALUES,
            log=self.folder / (LOG if len(self.runs) == 1 else ARRAY_LOG),
            lead=min(lead_of(self.runs[0], limit), LONGEST_LEAD),
            runs=len(self.runs),
            at_once=self.at_once,
        )

    def submit(self) -> str:
        """Write the script and its values, and submit it. Returns the id of the job, which is also
        written into the runs' folders. Raises UsageError, SlurmError."""
        script = self.script()
        for folder in (self.folder / LOG.parent, *(run / LOG.parent for run in self.runs)):
            make_folder(folder)
        replace_file(self.folder / VALUES, (json.dumps(self._values(), indent=2) + "\n").encode())
        replace_file(self.folder / SCRIPT, script.encode())
        # what the script has to say is in its own log,
        # unless somebody submits it without its folder
        answer = ask_slurm(
            ["sbatch", "--parsable", "--output=/dev/null", str(self.folder / SCRIPT)]
        )
        # what a site's sbatch says about its checks comes before the id
        job_id, _, cluster = answer.strip().rpartition("\n")[2].strip().partition(";")
        if not JOB_ID.fullmatch(job_id):
            raise SlurmError(f"sbatch answered {answer[:200]!r}, not the id of a job")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        for number, run in enumerate(self.runs):
            id_of_run = job_id if len(self.runs) == 1 else f"{job_id}_{number}"
            Submission(id_of_run, cluster or None, now, name=self.recipe.name).write(run)
        return job_id

    def _values(self) -> dict[str, Any]:
        project = current_project()
        runs = [
            {
                "folder": str(run),
                "arguments": ["resume", "--in-job", *self.options, "--", str(run), *self.overrides],
            }
            for run in self.runs
        ]
        environment = {VARIABLE: str(project)} if project is not None else {}
        return {"folder": str(Path.cwd()), "environment": environment, "runs": runs}


def planned(resolved: Resolved, run_dir: Path | None) -> JobArray:
    """The job of a new run; nothing is created. Raises UsageError, as its script does."""
    folder = (run_dir or _new_folder(resolved)).absolute()
    return JobArray(resolved.recipe, folder, (folder,))


def submit_run(
    resolved: Resolved, run_dir: Path | None, *, warn: Callable[[str], None] | None = None
) -> tuple[str, Path]:
    """Check a recipe (with `warn`, some of its rows too), create the folder of its run, and submit
    it. Returns the id of the job and the folder. Raises RlcliError and leaves nothing behind."""
    from rlcli.inspect.before_start import check_before_start
    from rlcli.launch.run import prepare_run
    from rlcli.observe.results import runs_first

    planned(resolved, run_dir).script()
    log_dir = str(Path(resolved.recipe.log.dir).expanduser())
    check_before_start(resolved, run_dir, runs_first(resolved, log_dir), warn)
    folder = (run_dir or _new_folder(resolved)).absolute()
    with undone_on_failure(folder):
        prepare_run(resolved, folder)
        return JobArray(resolved.recipe, folder, (folder,)).submit(), folder


def submit_again(
    run_dir: Path, overrides: Sequence[str], options: Sequence[str], recipe: Recipe
) -> str:
    """Continue a run that has ended as another job. Returns its id.
    Raises ResourceError if its job is not over."""
    earlier = Submission.read(run_dir)
    job = look_up_one(earlier.job_id, earlier.cluster) if earlier is not None else None
    if job is not None and job.is_alive:
        message = f"job {job.job_id} of this run is {job.state}"
        raise ResourceError(
            message,
            where=str(run_dir),
            hint=f"rlcli status {shlex.quote(str(run_dir))} shows it",
            code="F71",
        )
    folder = run_dir.absolute()
    return JobArray(recipe, folder, (folder,), tuple(options), tuple(overrides)).submit()


def planned_sweep(
    base: Resolved,
    sweep: Sweep,
    recipes: Sequence[Recipe],
    run_dir: Path | None,
    at_once: int | None,
) -> JobArray:
    """The array of a sweep, with the recipe of each run; nothing is created. Raises UsageError, as
    its script does, and if the jobs of its runs would differ."""
    first = recipes[0]
    for run, recipe in zip(sweep.runs, recipes, strict=True):
        if (recipe.cluster, recipe.launch.slurm) != (first.cluster, first.launch.slurm):
            message = f"{run.name} needs another job than {sweep.runs[0].name}"
            hint = "the jobs of an array are alike: submit a sweep for each value of these sections"
            raise UsageError(message, where="cluster, launch.slurm", hint=hint)
    folder = (run_dir or _new_folder(base)).absolute()
    return JobArray(first, folder, tuple(folder / run.name for run in sweep.runs), at_once=at_once)


def submit_sweep(
    batch: JobArray, sweep: Sweep, base: Resolved, *, warn: Callable[[str], None] | None = None
) -> str:
    """Check a sweep (with `warn`, some of its rows too), create the folders of its runs, and submit
    them. Returns the id of the array. Raises RlcliError and leaves nothing behind."""
    from rlcli.inspect.before_start import check_before_start
    from rlcli.launch.run import prepare_run
    from rlcli.observe.results import runs_first
    from rlcli.recipe.resolve import load_recipe

    batch.script()
    if missing := runs_first(base, str(Path(base.recipe.log.dir).expanduser())):
        first = missing[0].recipe.name
        missing_result = (
            f"the result of {first}, which does not exist yet; each would produce it itself"
        )
        raise ResourceError(
            f"the runs start from {missing_result}", hint=f"first: rlcli train {first}", code="F72"
        )
    check_before_start(base, None, [], warn)
    if Sweep.read(batch.folder) is not None:
        raise ResourceError(
            f"{batch.folder} holds a sweep", where="--run-dir", hint="choose another", code="F72"
        )
    with undone_on_failure(batch.folder):
        open_sweep(batch.folder, sweep)
        for run, folder in zip(sweep.runs, batch.runs, strict=True):
            prepare_run(
                load_recipe(sweep.recipe, [*sweep.overrides, *run.settings], sweep.layers), folder
            )
        return batch.submit()


@contextmanager
def undone_on_failure(folder: Path) -> Iterator[None]:
    """On failure, restore a folder: remove it, with any parents that did not exist before,
    or empty it."""
    was_there = folder.is_dir()
    above = [parent for parent in folder.parents if not parent.exists()]
    content = set(os.listdir(folder)) if was_there else set()
    try:
        yield
    except BaseException:
        for entry in os.scandir(folder) if folder.is_dir() else ():
            if entry.name not in content and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name not in content:
                os.unlink(entry.path)
        for created in [*([] if was_there else [folder]), *above]:
            if created.is_dir() and not any(created.iterdir()):
                created.rmdir()
        raise


def _new_folder(resolved: Resolved) -> Path:
    from rlcli.observe.run_directory import free_folder

    return free_folder(Path(resolved.recipe.log.dir).expanduser() / resolved.recipe.name)


def _limit_of_partitions(recipe: Recipe) -> int | None:
    """Default time limit of a job, in seconds: the shortest of its parts'; None if unlimited or
    unknown."""
    names = dict.fromkeys(part.partition for part in parts_of(recipe))
    options = recipe.launch.slurm.options
    limits = [_limit_of_partition(name, options) for name in names]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_of_partition(name: str | None, options: Mapping[str, object]) -> int | None:
    """Default time limit of a partition's jobs, in seconds, in the cluster that the options choose,
    and of several the shortest: Slurm takes whichever starts the job first. None if unlimited or
    unknown."""
    in_cluster = of_cluster(str(options.get("clusters") or options.get("cluster") or ""))
    try:
        asked = [
            "sinfo",
            *in_cluster,
            "--noheader",
            "--format=%P %L %l",
            *([f"--partition={name}"] if name else []),
        ]
        lines = [line.split() for line in ask_slurm(asked).splitlines()]
    except SlurmError:
        return None
    partitions = [line for line in lines if len(line) == 3 and (name or line[0].endswith("*"))]
    limits = (_first_limit(usual, longest) for _, usual, longest in partitions)
    return min((limit for limit in limits if limit is not None), default=None)


def _first_limit(*limits: str) -> int | None:
    """The seconds of the first limit that is one, of those that Slurm prints."""
    for limit in limits:
        try:
            return seconds_of(limit)
        except (ValueError, ArithmeticError):  # `infinite`, `n/a`
            continue
    return None
