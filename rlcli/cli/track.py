"""`rlcli track`: mirror a run to trackers afterwards."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlcli.api.headway import doing
from rlcli.cli.arguments import AsJson, RunName, RunsFolder, overview_of
from rlcli.cli.output import print_json, print_text
from rlcli.errors import ResourceError, RlcliError, UsageError, raise_all
from rlcli.observe.run_search import RUNS, short_name
from rlcli.project import check_run_not_planted


class TrackerName(StrEnum):
    """The trackers of `log.trackers`."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"


def track(
    run: RunName,
    to: Annotated[
        list[TrackerName] | None,
        typer.Option("--to", metavar="TRACKER", help="Default: log.trackers of its recipe."),
    ] = None,
    runs: RunsFolder = RUNS,
    as_json: AsJson = False,
) -> None:
    """Send what a run has written to trackers: metrics, samples, recipe and curve.

    A tracker that has some of it already gets the rest. TRACKER is tensorboard, wandb, mlflow or
    trackio; --to may be repeated.

    Example: rlcli track runs/ppo_math/20260412-093011 --to wandb
    """
    folder = overview_of(run, runs).folder
    check_run_not_planted(folder, "track")
    documents = []
    for tracker in [*map(str, to or ())] or _trackers_of(folder):
        with doing(f"sending the run to {tracker}"):
            entry, last_step = _mirror(folder, tracker)
        documents.append({"tracker": tracker, "last_step": last_step, "entry": entry})
        if not as_json:
            news = "had everything" if last_step is None else f"has all steps up to {last_step}"
            print_text(f"{tracker} {news} of {short_name(folder, runs)}: {entry}")
    if as_json:
        print_json({"run": str(folder), "trackers": documents})


def _trackers_of(folder: Path) -> list[str]:
    from rlcli.observe.run_comparison import recorded_recipe
    from rlcli.recipe.schema import Recipe

    # without its rows and models, whose paths are those of the folder that it was started in
    recipe = Recipe.model_validate(recorded_recipe(folder))
    if not recipe.log.trackers:
        raise UsageError(f"{folder} names no trackers", hint="add --to wandb, for example")
    return list(recipe.log.trackers)


def _mirror(folder: Path, name: str) -> tuple[str, int | None]:
    """Mirror a run. Returns its entry in the tracker and the last step that was added there.
    Raises ResourceError."""
    from rlcli.observe.trackers.mirror import Mirror
    from rlcli.recipe.requirements_here import missing_for_tracker

    raise_all(missing_for_tracker(name))
    mirror = Mirror(folder, name)
    if not mirror.acquire():
        message = f"another process sends {folder} to {name}"
        raise ResourceError(message, hint="a run that is running does so itself", code="F71")
    try:
        mirror.open()
        return mirror.close(), mirror.last_step
    except RlcliError:
        raise
    except Exception as error:
        message = f"{name} does not have all of {folder}: {error or type(error).__name__}"
        hint = "the command continues; a new attempt begins anew"
        raise ResourceError(message, code="F86", hint=hint) from error
