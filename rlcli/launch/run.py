"""One run from a resolved recipe: its warm starts first, then its workers, its master, and what it leaves behind."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.errors import ModelError, RlcliError, UsageError
from rlcli.launch.stopping import StopSignals

if TYPE_CHECKING:
    from rlcli.observe.display import Display
    from rlcli.observe.report import Outcome
    from rlcli.observe.run_directory import RunDirectory
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe, Role
    from rlcli.runtime.transport import Transport
    from rlcli.topology import Topology

DIGEST_FILE = "recipe.digest"


@dataclass(frozen=True)
class Finished:
    """What became of a run."""

    outcome: Outcome
    exit_code: int
    steps_done: int
    steps: int


def run_recipe(
    resolved: Resolved, run_dir: Path | None, display: Display, command: Sequence[str] | None = None
) -> Finished:
    """Run a recipe, after the recipes that it starts from. Raises RlcliError."""
    check_before_start(resolved)
    with StopSignals(display.note) as stop:
        recipe, stopped = _with_warm_starts(resolved, resolved.recipe.log.dir, display, stop)
        if stopped is not None:
            return stopped
        return _run_one(resolved, recipe, run_dir, resolved.recipe.log.dir, display, stop, command=command)


def check_before_start(resolved: Resolved) -> None:
    """What can be told from files alone, of the recipe and of those that it starts from. Loads nothing."""
    from rlcli.recipe.warm_start import chain

    for one in (*chain(resolved), resolved):
        recipe = one.recipe
        if recipe.launch.max_restarts:
            raise UsageError(
                "launch.max_restarts needs checkpoints to restart from, which do not exist yet",
                where=str(one.origin("launch.max_restarts")),
                hint="leave it at 0",
                code="R49",
            )
        for name, role in recipe.models.items():
            where = str(one.origin(("models", name, "path")))
            try:
                _check_files(role)
            except ModelError as error:
                raise ModelError(error.what, where=where, hint=error.hint, code=error.code) from None


def _check_files(role: Role) -> None:
    from rlcli.checkpoint.huggingface import check_folder, check_sizes

    folder = Path(role.path).expanduser() if role.path is not None else None
    if folder is None or not folder.is_dir():
        return
    check_folder(folder, weights=True)
    tokenizer = Path(role.tokenizer).expanduser() if role.tokenizer is not None else folder
    if tokenizer.is_dir():
        check_sizes(folder, tokenizer)


def _with_warm_starts(
    resolved: Resolved, log_dir: str, display: Display, stop: StopSignals
) -> tuple[Recipe, Finished | None]:
    """The recipe with `recipe:…` paths replaced by folders; recipes whose results are missing are run first."""
    from rlcli.recipe.warm_start import warm_starts

    models = dict(resolved.recipe.models)
    for start in warm_starts(resolved):
        folder = find_result(start.source, log_dir, start.source_role)
        if folder is None:
            display.note(f"{resolved.recipe.name} starts from {start.source.recipe.name}, which runs first")
            source, stopped = _with_warm_starts(start.source, log_dir, display, stop)
            finished = stopped or _run_one(
                start.source, source, None, log_dir, display, stop, title=f"warm start {source.name}"
            )
            if finished.exit_code:
                return resolved.recipe, finished
            folder = finished.outcome.models[start.source_role]
        else:
            display.note(f"starting from {folder}")
        models[start.role] = models[start.role].model_copy(update={"path": str(folder)})
    return resolved.recipe.model_copy(update={"models": models}), None


def find_result(source: Resolved, log_dir: str, role: str) -> Path | None:
    """The newest finished run of exactly this recipe, if there is one: the folder of a role's saved model."""
    from rlcli.observe.run_directory import read_status

    wanted = digest(source)
    for marker in sorted(Path(log_dir, source.recipe.name).glob(f"*/{DIGEST_FILE}"), reverse=True):
        status = read_status(marker.parent)
        folder = marker.parent / "models" / role
        is_done = status is not None and status.get("state") == "done" and (folder / "config.json").is_file()
        if is_done and marker.read_text().strip() == wanted:
            return folder.absolute()
    return None


def digest(resolved: Resolved) -> str:
    """Of everything in a recipe that its result depends on."""
    from rlcli.recipe.warm_start import warm_starts

    told = {key: value for key, value in resolved.to_json().items() if key not in ("launch", "log", "checkpoint")}
    told["starts"] = {start.role: [digest(start.source), start.source_role] for start in warm_starts(resolved)}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _run_one(
    resolved: Resolved,
    recipe: Recipe,
    run_dir: Path | None,
    log_dir: str,
    display: Display,
    stop: StopSignals,
    *,
    title: str = "step",
    command: Sequence[str] | None = None,
) -> Finished:
    from rlcli.observe.metrics import MetricsWriter
    from rlcli.observe.run_directory import RunDirectory
    from rlcli.observe.samples import SampleWriter
    from rlcli.runtime.master import MasterWorker
    from rlcli.runtime.outputs import Outputs
    from rlcli.topology import plan_topology

    began = time.monotonic()
    topology = plan_topology(recipe)
    with RunDirectory.create(run_dir, recipe.name, log_dir, command) as run:
        _write_down(run, resolved, recipe)
        tensorboard = run.tensorboard if recipe.log.tensorboard else None
        with (
            _status_of_failures(run),
            MetricsWriter(run.metrics, tensorboard, display.warning) as metrics,
            SampleWriter(run.samples, display.warning) as samples,
            _workers(recipe, topology, run.path) as transport,
        ):
            master = MasterWorker(
                recipe, topology, transport, Outputs(run, metrics, samples, display), stop, title=title
            )
            master.run()
            master.shut_down()
        code = 0 if master.steps_done == master.steps else stop.exit_code
        run.write_status("stopped" if code else "done", master.steps_done, master.steps, code)
        outcome = _outcome(recipe, run, time.monotonic() - began, master.eval_samples)
    return Finished(outcome, code, master.steps_done, master.steps)


def _write_down(run: RunDirectory, resolved: Resolved, recipe: Recipe) -> None:
    """The recipe as written and as it runs, and where each value came from."""
    for layer in resolved.layers:
        run.write_text(Path("recipe") / layer.label, layer.text)
    if resolved.overrides:
        run.write_text(Path("recipe") / "overrides.txt", "\n".join(resolved.overrides) + "\n")
    run.write_text("recipe.resolved.yaml", resolved.to_yaml())
    run.write_text("origins.json", json.dumps(resolved.origins, indent=2) + "\n")
    starts = {name: role.path for name, role in recipe.models.items() if role.path}
    run.write_text("starts.json", json.dumps(starts, indent=2) + "\n")
    run.write_text(DIGEST_FILE, digest(resolved) + "\n")


@contextmanager
def _status_of_failures(run: RunDirectory) -> Iterator[None]:
    """status.json is the authority on how a run ended, also when it failed."""
    try:
        yield
    except BaseException as error:
        from rlcli.observe.run_directory import read_status

        status = read_status(run.path) or {}
        code = error.exit_code if isinstance(error, RlcliError) else 1
        if isinstance(error, KeyboardInterrupt):
            code = 130
        run.write_status("failed", int(status.get("step") or 0), status.get("steps"), code, str(error)[:2000])
        raise


@contextmanager
def _workers(recipe: Recipe, topology: Topology, run_dir: Path) -> Iterator[Transport]:
    if recipe.launch.type == "inline":
        from rlcli.launch.inline import start_inline

        transport = start_inline(recipe, topology)
        yield transport
        transport.close()
        return
    from rlcli.launch.local import LocalRanks

    with LocalRanks(recipe, topology, run_dir) as ranks:
        yield ranks.transport
        ranks.wait()


def _outcome(recipe: Recipe, run: RunDirectory, seconds: float, eval_samples: Sequence[Sequence[Any]]) -> Outcome:
    from rlcli.observe.metrics import read_metrics
    from rlcli.observe.plot import plot_curves
    from rlcli.observe.report import Outcome

    records = read_metrics(run.metrics)
    if recipe.log.plot:
        plot_curves(records, run.curve, recipe.name)
    pairs = list(zip(eval_samples[0], eval_samples[-1], strict=True)) if len(eval_samples) > 1 else []
    return Outcome(
        recipe=recipe.name,
        run_dir=run.path,
        records=records,
        seconds=seconds,
        models={role: run.model(role) for role in recipe.saved_roles},
        samples=[(before, after) for before, after in pairs if before.response != after.response],
    )
