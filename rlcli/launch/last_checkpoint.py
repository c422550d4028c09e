"""The checkpoint that a run continues from: the newest one that is whole."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.api.headway import say
from rlcli.errors import ModelError, NoWholeCheckpoint

if TYPE_CHECKING:
    from rlcli.checkpoint.run_state import Start
    from rlcli.checkpoint.verify import CompleteCheckpoint
    from rlcli.launch.launcher import Running
    from rlcli.observe.display import Display
    from rlcli.observe.run_directory import RunDirectory
    from rlcli.recipe.schema import Recipe
    from rlcli.topology import Topology


def last_checkpoint(
    run: RunDirectory, display: Display, rejected: dict[Path, ModelError] | None = None
) -> Start | None:
    """The newest checkpoint that looks whole by names, sizes and the content of its state; None if
    there is none yet. Its other files must be verified before they are loaded. `rejected`: those
    already found not to be whole; each newer one is added, with a warning.

    Raises NoWholeCheckpoint if checkpoints exist but none is whole, or F21 if one was committed and
    there is none now: training progress must not be discarded silently.
    """
    from rlcli.checkpoint.disk import check_writable
    from rlcli.checkpoint.run_state import RunState, Start

    rejected = {} if rejected is None else rejected
    reported = {*rejected}
    checkpoint: CompleteCheckpoint | None = None
    if os.path.lexists(run.checkpoints):
        check_writable(run.checkpoints)  # it may be a link to a disk that is missing or read-only
        checkpoint = _newest_with_state(run, rejected)
    for path, error in rejected.items():
        if path not in reported:
            _warn_of(error, display)
    if checkpoint is None:
        _require_none_before(run, rejected)
        return None
    last = run.record.step
    if last is not None and last > checkpoint.manifest.step and not rejected:
        display.warning(f"[F21] {run.checkpoints}: the last checkpoint, of step {last}, is missing")
    return Start(checkpoint.path, RunState.read(checkpoint.path))


def _require_none_before(run: RunDirectory, rejected: dict[Path, ModelError]) -> None:
    """Raise NoWholeCheckpoint if a run without a whole checkpoint has had one."""
    code, committed = "F21", last_committed(run)
    if rejected:
        code, message = next(iter(rejected.values())).code, "no checkpoint is intact"
    elif committed is not None:
        message = f"step {committed} was committed, but there is no checkpoint now"
    elif run.record.is_lost:
        message = (
            "there is no checkpoint, and committed.json, which says whether there was one, is "
            "gone or cannot be read"
        )
    else:
        return
    hint = (
        "put it back; or start over in a new folder: rlcli train "
        f"{shlex.quote(str(run.resolved_recipe))}"
    )
    raise NoWholeCheckpoint(message, where=str(run.checkpoints), hint=hint, code=code)


def _warn_of(error: ModelError, display: Display) -> None:
    display.warning(f"[{error.code}] {error.where}: {error.what}")


def verified_checkpoint(
    start: Start | None,
    running: Running,
    recipe: Recipe,
    topology: Topology,
    run: RunDirectory,
    display: Display,
) -> Start | None:
    """The newest checkpoint that the ranks found to be whole, every byte of it; None if there is
    none yet. Raises NoWholeCheckpoint."""
    from rlcli.runtime.checkpoints import verify_on_ranks
    from rlcli.runtime.rank_counts import VERIFYING
    from rlcli.runtime.ranks import Ranks

    ranks = Ranks(running.transport, topology.world_size, recipe.launch.step_deadline)
    patience = recipe.launch.startup_deadline
    rejected: dict[Path, ModelError] = {}
    while start is not None:
        say(VERIFYING)
        faults = ranks.run(verify_on_ranks(start.folder, ranks, topology.world_size, patience))
        if not faults:
            break
        rejected[start.folder] = faults[0]
        _warn_of(faults[0], display)
        start = last_checkpoint(run, display, rejected)
        if start is not None:
            display.note(f"resuming after step {start.state.step} instead")
    return start


def last_committed(run: RunDirectory) -> int | None:
    """The last step that was committed, wherever the checkpoints are now;
    None if there was none yet."""
    from rlcli.checkpoint.retention import latest_step

    resumed = [
        step
        for entry in run.read_resumes()
        if isinstance(step := entry.get("step"), int) and step > 0
    ]
    steps = [run.record.step, latest_step(run.checkpoints), *resumed]
    return max((step for step in steps if step is not None), default=None)


def _newest_with_state(
    run: RunDirectory, rejected: dict[Path, ModelError]
) -> CompleteCheckpoint | None:
    """The newest checkpoint that is complete, and whose state, which is read here,
    is what was written."""
    from rlcli.checkpoint.run_state import STATE
    from rlcli.checkpoint.verify import damaged_files, newest_complete

    while (checkpoint := newest_complete(run.checkpoints, run.run_id, rejected)) is not None:
        state = [file for file in checkpoint.manifest.files.values() if file.path == STATE]
        faults = damaged_files(checkpoint.path, state, 1)
        if not faults:
            break
        rejected[checkpoint.path] = faults[0]
    return checkpoint
