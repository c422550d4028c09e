"""`rlcli ckpt`: list, verify, show and prune the checkpoints of a run."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli.arguments import AsJson
from rlcli.cli.output import print_error, print_json, print_table, print_text
from rlcli.cli.verbs import VerbCommand, new_typer
from rlcli.errors import RlcliError, UsageError
from rlcli.observe.run_search import named_folder
from rlcli.units import age, count, size

if TYPE_CHECKING:
    from rlcli.checkpoint.manifest import Manifest
    from rlcli.checkpoint.overview import CheckpointEntry, CheckpointLocation
    from rlcli.checkpoint.retention import Best
    from rlcli.checkpoint.verify import CheckpointReport

ckpt = new_typer(
    help="""List, verify, prune and show the checkpoints of a run.

    With --json each of these prints JSON.

    Example: rlcli ckpt ls runs/ppo_math/20260412-093011
    """
)


class Which(StrEnum):
    """Which value of a metric is best."""

    HIGHEST = "highest"
    LOWEST = "lowest"


Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run, its folder of checkpoints, or one checkpoint.",
    ),
]
Steps = Annotated[
    list[int] | None,
    typer.Option("--step", metavar="N", help="Only the checkpoint of this step; may be repeated."),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--best-metric",
        metavar="NAME",
        help="Metric that ranks checkpoints; default: the recipe's.",
    ),
]
BestIs = Annotated[
    Which | None,
    typer.Option("--best-is", help="Whether the highest or lowest is best; default: the recipe's."),
]


@ckpt.command(cls=VerbCommand)
def ls(
    run: Run, best_metric: Metric = None, best_is: BestIs = None, as_json: AsJson = False
) -> None:
    """List the checkpoints of a run, newest first.

    The state is judged by names and sizes; `rlcli ckpt verify` reads every byte.

    Example: rlcli ckpt ls runs/ppo_math/20260412-093011
    """
    from rlcli.checkpoint.overview import find_checkpoints, leftovers, overview

    location = find_checkpoints(named_folder(run))
    best = _best(location, 1, best_metric, best_is)
    entries, unfinished = overview(location, best), list(leftovers(location))
    if as_json:
        checkpoints = [_entry_as_json(entry) for entry in entries]
        print_json(
            {
                "folder": str(location.folder),
                "checkpoints": checkpoints,
                "unfinished": [p.name for p in unfinished],
            }
        )
        return
    if entries:
        print_table(
            ["step", "age", "size", "state", "marks"], [_row(entry, best) for entry in entries]
        )
    else:
        print_text(f"no checkpoints in {location.folder}")
    if unfinished:
        print_text(
            f"and {count(len(unfinished), 'folder')} being written or deleted, or left "
            "by a process that died"
        )


@ckpt.command(cls=VerbCommand)
def verify(run: Run, step: Steps = None, as_json: AsJson = False) -> int:
    """Compare every byte of the checkpoints with what was written.

    Exits with 5 if one is incomplete, naming each file that is damaged or missing.

    Example: rlcli ckpt verify runs/ppo_math/20260412-093011 --step 40
    """
    from rlcli.checkpoint.overview import find_checkpoints
    from rlcli.checkpoint.verify import examine

    location = find_checkpoints(named_folder(run))
    reports = []
    for path in location.select(step or ()):
        report = examine(path, run_id=_run_id(location))
        reports.append(report)
        if not as_json:
            print_text(_verdict(report))
            for fault in report.faults:
                print_error(fault)
    intact = [report for report in reports if not report.faults]
    if as_json:
        described = [_report_as_json(report) for report in reports]
        print_json(
            {
                "ok": len(intact) == len(reports),
                "folder": str(location.folder),
                "checkpoints": described,
            }
        )
    return max((fault.exit_code for report in reports for fault in report.faults), default=0)


@ckpt.command(cls=VerbCommand)
def prune(
    run: Run,
    keep_last: Annotated[
        int, typer.Option("--keep-last", metavar="N", help="Keep this many of the newest.")
    ],
    keep_best: Annotated[
        int, typer.Option("--keep-best", metavar="N", help="Also keep this many of the best.")
    ] = 0,
    best_metric: Metric = None,
    best_is: BestIs = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete all checkpoints but the newest, the best and the last valid one.

    Example: rlcli ckpt prune runs/ppo_math/20260412-093011 --keep-last 1 --keep-best 1
    """
    from rlcli.checkpoint.commit import clear_leftovers
    from rlcli.checkpoint.overview import overview
    from rlcli.checkpoint.retention import prune as delete

    location = _several(run, keep_last, keep_best)
    with contextlib.nullcontext() if dry_run else _held(location):
        run_id = _run_id(location)
        # without the run's lock a save may be in progress in the folder
        if run_id is not None and not dry_run:
            clear_leftovers(location.folder, run_id)
        before = {entry.report.path: entry for entry in overview(location, None)}
        best = _best(location, keep_best, best_metric, best_is)
        deleted = delete(location.folder, keep_last, best, run_id=run_id, dry_run=dry_run)
    gone = [before[path] for path in deleted]
    remaining = [entry for path, entry in before.items() if path not in deleted]
    _print_pruned(location, gone, remaining, dry_run, as_json)


def _print_pruned(
    location: CheckpointLocation,
    gone: Sequence[CheckpointEntry],
    remaining: Sequence[CheckpointEntry],
    dry_run: bool,
    as_json: bool,
) -> None:
    if as_json:
        document: dict[str, Any] = {"dry_run": dry_run, "folder": str(location.folder)}
        document["deleted"] = list(map(_entry_as_json, gone))
        document["kept"] = list(map(_entry_as_json, remaining))
        print_json(document)
    else:
        print_text(f"{'would delete' if dry_run else 'deleted':<12}  {_steps(gone)}")
        print_text(f"{'kept':<12}  {_steps(remaining)}")


def _several(run: Path, keep_last: int, keep_best: int) -> CheckpointLocation:
    """The folder of the run's checkpoints. Raises UsageError if none of them would be kept, or if
    it is a single one."""
    from rlcli.checkpoint.overview import find_checkpoints

    if keep_last < 1 or keep_best < 0:
        raise UsageError(
            "at least one checkpoint must be kept",
            hint="--keep-last 1 or more, --keep-best 0 or more",
        )
    location = find_checkpoints(named_folder(run))
    if location.only is not None:
        raise UsageError(
            f"{run} is a single checkpoint",
            hint=f"rlcli ckpt prune {shlex.quote(str(location.folder))} --keep-last {keep_last}",
        )
    return location


@ckpt.command(cls=VerbCommand)
def show(
    run: Run,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="Which checkpoint; default: the newest."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a checkpoint's run, metrics and files.

    Example: rlcli ckpt show runs/ppo_math/20260412-093011 --step 40
    """
    from rlcli.checkpoint.manifest import read_manifest
    from rlcli.checkpoint.overview import find_checkpoints

    location = find_checkpoints(named_folder(run))
    path = location.select([] if step is None else [step])[0]
    manifest = read_manifest(path)
    if as_json:
        print_json({"path": str(path)} | manifest.as_json())
        return
    for name, value in _facts(path, manifest):
        print_text(f"{name:<8}  {value}")
    if manifest.metrics:
        print_text()
        print_table(
            ["metric", "value"],
            [(name, f"{value:.6g}") for name, value in sorted(manifest.metrics.items())],
        )
    print_text()
    rows = [
        (size(file.bytes), file.sha256[:12], name) for name, file in sorted(manifest.files.items())
    ]
    print_table(["size", "sha256", "file"], rows)


def _facts(path: Path, manifest: Manifest) -> list[tuple[str, str]]:
    written = time.strftime(
        "%Y-%m-%d %H:%M:%S", time.localtime((path / "MANIFEST.json").stat().st_mtime)
    )
    return [
        ("step", str(manifest.step)),
        ("folder", str(path)),
        ("written", f"{written} by rlcli {manifest.rlcli} on {count(manifest.world_size, 'rank')}"),
        ("run", manifest.run_id),
        ("recipe", manifest.recipe_digest),
        ("size", f"{size(manifest.size)} in {count(len(manifest.files), 'file')}"),
    ]


def _row(entry: CheckpointEntry, best: Best | None) -> tuple[str, ...]:
    report = entry.report
    marks = ["LATEST"] if entry.is_latest else []
    if entry.is_best and best is not None and report.manifest is not None:
        marks.append(f"best ({best.metric} {report.manifest.metrics[best.metric]:.4g})")
    marks += [fault.what for fault in report.faults[:1]]
    large = size(report.manifest.size) if report.manifest is not None else ""
    old = age(time.time() - entry.written) if entry.written is not None else ""
    return _name(report), old, large, report.state, ", ".join(marks)


def _name(report: CheckpointReport) -> str:
    return report.path.name if report.step is None else str(report.step)


def _verdict(report: CheckpointReport) -> str:
    line = f"step {_name(report)}  {report.state}"
    if report.manifest is not None:
        line += f"  {count(len(report.manifest.files), 'file')}, {size(report.manifest.size)}"
    if report.strangers:
        ellipsis = " …" if len(report.strangers) > 3 else ""
        line += f"; not part of it: {', '.join(report.strangers[:3])}{ellipsis}"
    return line


def _steps(entries: Sequence[CheckpointEntry]) -> str:
    if not entries:
        return "nothing"
    reports = [entry.report for entry in entries]
    total = sum(report.manifest.size for report in reports if report.manifest is not None)
    return f"step {', '.join(map(_name, reports))} ({size(total)})"


def _entry_as_json(entry: CheckpointEntry) -> dict[str, Any]:
    manifest = entry.report.manifest
    state = {"written": entry.written, "latest": entry.is_latest, "best": entry.is_best}
    metrics = dict(manifest.metrics) if manifest is not None else None
    return _report_as_json(entry.report) | state | {"metrics": metrics}


def _report_as_json(report: CheckpointReport) -> dict[str, Any]:
    faults = [
        {"code": fault.code, "where": fault.where, "what": fault.what} for fault in report.faults
    ]
    return {
        "step": report.step,
        "path": str(report.path),
        "state": report.state,
        "bytes": report.manifest.size if report.manifest is not None else None,
        "faults": faults,
        "strangers": list(report.strangers),
    }


def _best(
    location: CheckpointLocation, count: int, metric: str | None, which: Which | None
) -> Best | None:
    """The best `count`, according to the options, or the run's recipe where they are not given."""
    from rlcli.checkpoint.retention import Best

    if not count:
        return None
    settings = _recipe_settings(location) if metric is None or which is None else {}
    name = metric or str(settings.get("best_metric", "eval/accuracy"))
    is_lowest = which is Which.LOWEST if which is not None else settings.get("best_is") == "lowest"
    return Best(name, "lowest" if is_lowest else "highest", count)


def _recipe_settings(location: CheckpointLocation) -> dict[str, Any]:
    """The section `checkpoint:` of the run's recipe, empty if it cannot be read."""
    from rlcli.observe.run_comparison import recorded_recipe

    section = None
    with contextlib.suppress(RlcliError):
        section = (
            recorded_recipe(location.run).get("checkpoint") if location.run is not None else None
        )
    return section if isinstance(section, dict) else {}


def _run_id(location: CheckpointLocation) -> str | None:
    from rlcli.observe.run_record import read_status

    status = read_status(location.run) if location.run is not None else None
    run_id = status.get("run_id") if status is not None else None
    return run_id if isinstance(run_id, str) else None


def _held(location: CheckpointLocation) -> contextlib.AbstractContextManager[object]:
    """Hold the run's lock: what a live run is writing must not be deleted.
    Raises ResourceError F71."""
    from rlcli.observe.run_directory import RunDirectory

    return (
        RunDirectory.reopen(location.run) if location.run is not None else contextlib.nullcontext()
    )
