"""Stops a run from outside: first like a Ctrl-C, then like a second Ctrl-C, finally by SIGKILL.

Only processes that the run has recorded are signalled, each by number and start time, and only on
their own machine.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlcli.api.run_folder import CHECKPOINTS, LOCK
from rlcli.errors import ResourceError
from rlcli.observe.run_directory import MODELS
from rlcli.observe.run_lock import Holder
from rlcli.observe.run_overview import Overview, is_asked_to_stop, note_stop, read_processes
from rlcli.observe.series import seconds_of
from rlcli.processes import ProcessRecord

LOOK_SECONDS = 0.1
APART = 0.5
"""Seconds between two signals of one kind, so that both arrive."""
LEAVES_WITHIN = 5.0
"""Seconds that a run gets to stop immediately before it is killed,
and then its supervisor to clean up."""
SHORTEST_GRACE = 60.0
STEPS = 20
"""Number of last steps, the longest of which shows how long a step may take."""
LOOK_AT_FILES = 1.0
"""Seconds between two checks of what a run has saved."""
QUIET = 120.0
"""Seconds without a new byte after which a run is not saving any more: files are also synced and
digested."""


class StopPatience:
    """How long a run gets to finish its step and save, from now on."""

    def __init__(self, seconds: float, folder: Path | None = None):
        """`folder`: the run's, if it also gets the time to save what it is saving by then."""
        self.seconds = seconds
        self._folder = folder
        self._looked = time.monotonic()
        self._end = self._looked + seconds
        self._saved = _bytes_being_saved(folder) if folder is not None else 0
        self._wrote = -math.inf
        """When it was last seen to have written some of that."""

    def is_over(self) -> bool:
        now = time.monotonic()
        if self._folder is not None and now - self._looked >= LOOK_AT_FILES:
            before, self._saved = self._saved, _bytes_being_saved(self._folder)
            self._looked, self._wrote = now, now if self._saved != before else self._wrote
        return now >= max(self._end, self._wrote + QUIET)

    def __str__(self) -> str:
        longer = "" if self._folder is None else ", and while it saves"
        return f"up to {self.seconds:.0f} s{longer}"


def _bytes_being_saved(run: Path) -> int:
    """The size of a checkpoint that is being written, and of the models."""
    from rlcli.checkpoint.commit import TEMPORARY
    from rlcli.checkpoint.disk import files_under

    total = 0
    for folder in (*(run / CHECKPOINTS).glob(f"{TEMPORARY}*"), run / MODELS):
        for file in files_under(folder).values():
            with suppress(OSError):  # it has got its name, or is gone
                total += file.lstat().st_size
    return total


def grace_of(records: Sequence[Mapping[str, Any]]) -> float:
    """Seconds that a run gets to finish its step and save: three times the longest of its last
    steps, and a minute."""
    return SHORTEST_GRACE + 3 * max(map(seconds_of, records[-STEPS:]), default=0.0)


def stop_here(
    run: Overview, *, at_once: bool, patience: StopPatience, wait: bool, say: Callable[[str], None]
) -> bool:
    """End a run of this machine: after its step or, if that takes too long, at once. Returns
    whether it could finish its step. Raises ResourceError."""
    holder = ask_to_stop(run)
    if not (at_once or wait):
        return True
    if at_once:
        time.sleep(APART)
    else:
        say(f"asked pid {holder.owner.pid} to stop after its step; waiting {patience}")
        if wait_for_end(holder, patience):
            end_stragglers(run.folder, say)
            return True
    if wait:
        end_now(run, holder, say)
    else:
        _signal_first(holder.processes, signal.SIGTERM)
    return False


def ask_to_stop(run: Overview) -> Holder:
    """Ask a run to stop after its step. Asking again sends no further signal.
    Returns the process to wait for.

    Raises ResourceError if it belongs to another machine or user, or did not record its process.
    """
    holder = _reachable(run)
    if not is_asked_to_stop(run.folder, holder):
        note_stop(run.folder, holder)
        _signal_first(holder.processes, signal.SIGTERM)
    return holder


def wait_for_end(holder: Holder, patience: StopPatience) -> bool:
    """Whether the run ends in time."""
    while holder.is_alive():
        if patience.is_over():
            return False
        time.sleep(LOOK_SECONDS)
    return True


def end_now(run: Overview, holder: Holder, say: Callable[[str], None]) -> None:
    """End a run whatever it is doing, with all its recorded processes on this machine. Raises
    ResourceError if even that fails."""
    if holder.is_alive():
        _signal_first(holder.processes, signal.SIGTERM)
    if not wait_for_end(holder, StopPatience(LEAVES_WITHIN)):
        say(f"pid {holder.owner.pid} does not stop; killing it")
        _send(holder.owner, signal.SIGKILL)
        if not wait_for_end(holder, StopPatience(LEAVES_WITHIN)):
            for process in holder.processes:
                _send(process, signal.SIGKILL)
    end_stragglers(run.folder, say)
    if not wait_for_end(holder, StopPatience(LEAVES_WITHIN)):
        message = f"{run.folder}: pid {holder.owner.pid} does not end, even after SIGKILL"
        raise ResourceError(
            message, hint="it is waiting for a disk or device that does not respond"
        )


def end_stragglers(folder: Path, say: Callable[[str], None]) -> None:
    """Kill the processes recorded by the launcher that are still alive on this machine."""
    for name, process in read_processes(folder):
        if process.is_here and _send(process, signal.SIGKILL):
            say(f"killed {name}, pid {process.pid}, which had not ended with the run")


def _reachable(run: Overview) -> Holder:
    holder, lock = run.holder, run.folder / LOCK
    if holder is None:
        hint = "stop it where it was started: Ctrl-C once"
        raise ResourceError(
            f"{run.folder} does not name its process", where=str(lock), hint=hint, code="F72"
        )
    if not holder.owner.is_here:
        host = holder.owner.host
        command = f"rlcli stop {shlex.quote(str(run.folder.absolute()))}"
        message = f"{run.folder} is running on {host}, which is another machine"
        raise ResourceError(message, hint=f"there: {command}")
    if lock.stat().st_uid != os.geteuid():
        raise ResourceError(
            f"{run.folder} is another user's run", where=str(lock), hint="ask them", code="F75"
        )
    return holder


def _signal_first(processes: Sequence[ProcessRecord], number: int) -> None:
    """Send the signal to the first process that is alive."""
    for process in processes:
        if _send(process, number):
            return


def _send(process: ProcessRecord, number: int) -> bool:
    try:
        return process.send(number)
    except PermissionError:
        message = f"pid {process.pid} belongs to another user"
        raise ResourceError(message, hint="stop it as that user", code="F75") from None
