"""The folder of a run: the paths of its files, who holds its lock, and how far the run is."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal

from rlcli.api.run_folder import CHECKPOINTS, ENVIRONMENT, LOCK, LOGS, RESOLVED_RECIPE, STATUS
from rlcli.errors import ResourceError, UsageError
from rlcli.files import (
    FOLDER_MODE,
    make_folder,
    not_writable,
    open_private,
    read_text,
    replace_file,
)
from rlcli.observe.environment import describe_environment
from rlcli.observe.json_lines import Dropped, keep_until
from rlcli.observe.run_lock import RunLock
from rlcli.observe.run_readme import readme
from rlcli.observe.run_record import Record, read_status
from rlcli.processes import ProcessRecord

log = logging.getLogger(__name__)

RunState = Literal["submitted", "starting", "running", "stopping", "done", "stopped", "failed"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = {
    "CON",
    "PRN",
    "AUX",
    "NUL",
    *(f"{port}{n}" for port in ("COM", "LPT") for n in range(1, 10)),
}

RESUMES = "resumes.jsonl"
"""File with one line for each time the run was resumed."""
BEFORE_A_RUN = {LOCK, LOGS}
"""Files that a fresh folder may contain: the lock,
and the log files that a launcher opens first."""

UNFINISHED = re.compile(r"\.(writable-|(committed|status)\.json\.)[0-9a-f]{32}")
"""Files of a start that was killed while it wrote them."""

LAYERS, METRICS, MODELS = "recipe", "metrics.jsonl", "models"
OF_A_RUN = {RESOLVED_RECIPE, METRICS, CHECKPOINTS, MODELS}
"""Of a run that has begun at least one of these exists."""


def check_name(name: str, subject: str) -> str:
    """Check a name that becomes part of a path: at most 64 letters, digits, `. _ -`,
    and no way out of its folder."""
    if not NAME.fullmatch(name) or name.endswith(".") or name.split(".")[0].upper() in RESERVED:
        hint = "use 1 to 64 of A-Z a-z 0-9 . _ - with a letter or digit first, no dot last"
        raise UsageError(f"{name[:80]!r} cannot be the name of a {subject}", hint=hint, code="R68")
    return name


class RunDirectory:
    """One run's folder. `create` makes and locks it;
    `open` is for processes other than the owner."""

    def __init__(self, path: Path, run_id: str, lock: RunLock | None = None):
        self.path = path
        self.run_id = run_id
        self._lock = lock
        self.metrics = path / METRICS
        self.samples = path / "samples.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.status = path / STATUS
        self.models = path / MODELS
        self.checkpoints = path / CHECKPOINTS
        self.curve = path / "curve.png"
        self.recipe = path / LAYERS
        """The recipe's layers as written."""
        self.resolved_recipe = path / RESOLVED_RECIPE
        self.origins = path / "origins.json"
        self.logs = path / LOGS
        self.environment = path / ENVIRONMENT
        self.readme = path / "README.md"
        self.record = Record(path, run_id)
        """What is safely on disk."""
        self._started = _now()
        self._warned = False

    @classmethod
    def create(
        cls,
        path: Path | None,
        recipe_name: str,
        log_dir: Path | str = "runs",
        command: Sequence[str] | None = None,
        supervisor: ProcessRecord | None = None,
    ) -> RunDirectory:
        """Create the folder of a new run, hold its lock, and write README.md,
        environment.json and status.json.

        Without a `path` it is `<log_dir>/<recipe_name>/<YYYYmmdd-HHMMSS>`, made unique. `command`
        repeats the run, by default this process's own; `supervisor` watches this process. Raises
        ResourceError: F71 a live run holds the folder, F72 the folder is in use, F75 it is not
        writable; UsageError R68 for an invalid name.
        """
        check_name(recipe_name, "recipe")
        try:
            folder = (
                fresh_folder(Path(log_dir) / recipe_name) if path is None else Path(path).absolute()
            )
            make_folder(folder)
            if not (folder / LOCK).exists():
                _refuse_used(folder)
            lock = RunLock.acquire(folder / LOCK)
        except OSError as error:
            raise _not_writable(path or Path(log_dir), error) from None
        try:
            _refuse_used(folder)  # again: another run may have come and gone before we got the lock
            lock.record_holder(supervisor)
            shutil.rmtree(folder / LAYERS, ignore_errors=True)  # of a start that was interrupted
            run = cls(folder, uuid.uuid4().hex, lock)
            run._write_first_files(recipe_name, sys.argv if command is None else command)
        except OSError as error:
            lock.release()
            raise _not_writable(folder, error) from None
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """The folder of an existing run, without its lock.
        Raises ResourceError F72 if it is not a run's folder."""
        folder = Path(path).absolute()
        status = read_status(folder)
        if status is None:
            missing = "it has neither status.json nor committed.json nor the README.md of a run"
            raise ResourceError(f"{folder} is not the folder of a run", hint=missing, code="F72")
        run = cls(folder, status["run_id"])
        run._started = str(status.get("started", run._started))
        return run

    @classmethod
    def reopen(cls, path: Path | str, supervisor: ProcessRecord | None = None) -> RunDirectory:
        """The folder of a run that has ended, with its lock, to continue it. Raises ResourceError:
        F71 it is still running, F72 it is not a run's folder, F75 it is not writable."""
        run = cls.open(path)
        try:
            run._lock = RunLock.acquire(run.path / LOCK)
            _check_writable(run.path)
            run._lock.record_holder(supervisor)
        except OSError as error:
            run.close()
            raise _not_writable(run.path, error) from None
        return run

    def forget_after(self, step: int) -> list[Dropped]:
        """Remove the records of later steps from the metrics, the samples and the ledger:
        they are produced again.

        Returns what was removed. Raises ResourceError F75.
        """
        try:
            dropped = [keep_until(file, step) for file in (self.metrics, self.samples, self.ledger)]
        except OSError as error:
            raise _not_writable(self.path, error) from None
        return [removed for removed in dropped if removed is not None]

    def absent_records(self) -> list[str]:
        """Names of the files of finished steps that are not there."""
        return [file.name for file in (self.metrics, self.ledger) if not file.exists()]

    def model(self, role: str) -> Path:
        """Where the trained model of a role is saved."""
        return self.inside(Path(MODELS) / check_name(role, "model"))

    def inside(self, relative: Path | str) -> Path:
        """A path in this folder. Raises UsageError S7 if it would be outside, links followed."""
        root, target = self.path.resolve(), (self.path / relative).resolve()
        if target == root or root not in target.parents:
            raise UsageError(f"{str(relative)!r} is not inside {self.path}", code="S7")
        return target

    def write_text(self, relative: Path | str, text: str) -> Path:
        """Write a file of the run, readable by its owner only, creating its parent folders."""
        target = self.inside(relative)
        try:
            make_folder(target.parent)
            replace_file(target, text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise _not_writable(target, error) from None
        return target

    def write_status(
        self,
        state: RunState,
        step: int,
        steps: int | None,
        exit_code: int | None = None,
        message: str | None = None,
    ) -> None:
        """Replace status.json, the authority on the run's state. A full disk costs a warning,
        not the run."""
        status = {
            "run_id": self.run_id,
            "state": state,
            "step": step,
            "steps": steps,
            "exit_code": exit_code,
            "message": message,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": self._started,
            "updated": _now(),
        }
        try:
            self.record.update(is_done=state == "done")
            replace_file(self.status, _json(status))
            self._warned = False
        except OSError as error:
            if not self._warned:
                log.warning(
                    "status.json is not written: %s (%s)", error.strerror or error, self.status
                )
            self._warned = True

    def write_failure(self, exit_code: int, message: str) -> None:
        """Record in status.json that the run failed, at the step it had reached."""
        status = read_status(self.path) or {}
        self.write_status(
            "failed", status.get("step", 0), status.get("steps"), exit_code, message[:2000]
        )

    def note_resume(self, step: int, changes: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record that the run is continued after a step, and with which changes of its recipe."""
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "changes": [*changes]}
        try:
            earlier = read_text(self.path / RESUMES) if (self.path / RESUMES).exists() else ""
        except OSError as error:
            raise _not_writable(self.path / RESUMES, error) from None
        self.write_text(RESUMES, earlier + json.dumps(entry) + "\n")

    def changes_on_resume(self) -> list[tuple[int, dict[str, Any]]]:
        """(the step, key → its value from then on) each time that the run was resumed with other
        settings."""
        changed = []
        for entry in self.read_resumes():
            with suppress(KeyError, TypeError, ValueError):
                values = {str(change["key"]): change["now"] for change in entry["changes"]}
                changed += [(int(entry["step"]), values)] if values else []
        return changed

    def read_resumes(self) -> list[dict[str, Any]]:
        """The entries written each time that the run was resumed, as far as they can be read."""
        entries = []
        for line in (
            read_text(self.path / RESUMES).splitlines() if (self.path / RESUMES).is_file() else ()
        ):
            with suppress(ValueError):
                entries.append(json.loads(line))
        return [entry for entry in entries if isinstance(entry, dict)]

    def close(self) -> None:
        """Release the lock; the files stay."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_first_files(self, recipe_name: str, command: Sequence[str]) -> None:
        _check_writable(self.path)  # before anything is started
        self.write_status("starting", 0, None)
        replace_file(self.environment, _json({"command": list(command), **describe_environment()}))
        self.write_text("README.md", readme(recipe_name, self.run_id, self._started, command))


def _check_writable(folder: Path) -> None:
    """Raises OSError if no file can be created there."""
    probe = folder / f".writable-{uuid.uuid4().hex}"
    os.close(open_private(probe, os.O_WRONLY | os.O_EXCL))
    probe.unlink()


def check_new_folder(folder: Path, *, is_run: bool) -> None:
    """Check that a run can begin in a folder or (not `is_run`) in a new folder within it; creates
    nothing. Raises ResourceError F71, F72 or F75."""
    try:
        if is_run and folder.is_dir():
            if (folder / LOCK).exists():
                RunLock.acquire(folder / LOCK).release()
            _refuse_used(folder)
        above = next(
            ancestor for ancestor in (folder, *folder.parents) if os.path.lexists(ancestor)
        )
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(above))
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied", str(above))
    except OSError as error:
        raise _not_writable(folder, error) from None


def fresh_folder(parent: Path) -> Path:
    """Create a new folder named by the local time; further runs of the same second get `-2`,
    `-3`, …"""
    make_folder(parent.absolute())
    while True:
        with suppress(FileExistsError):  # created by another process meanwhile
            folder = free_folder(parent)
            folder.mkdir(mode=FOLDER_MODE)
            return folder


def free_folder(parent: Path) -> Path:
    """The path of such a folder, which is not created yet."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = (stamp if number == 1 else f"{stamp}-{number}" for number in count(1))
    return next(folder for name in names if not os.path.lexists(folder := parent.absolute() / name))


def _refuse_used(folder: Path) -> None:
    names = {entry.name for entry in folder.iterdir()} - BEFORE_A_RUN
    entries = [name for name in names if not UNFINISHED.fullmatch(name)]
    status = read_status(folder) if entries else None
    # one that died before it had written down its recipe cannot be resumed
    if not entries or (status is not None and OF_A_RUN.isdisjoint(entries)):
        return
    run = f"holds a run ({status.get('state')} at step {status.get('step')})" if status else ""
    again = (
        f"rlcli resume {shlex.quote(str(folder))} continues it"
        if status
        else "leave it out for a new folder per run"
    )
    hint = f"choose another --run-dir; {again}"
    raise ResourceError(
        f"{folder} {run or 'is not empty'}", where="--run-dir", hint=hint, code="F72"
    )


def _not_writable(path: Path, error: OSError) -> ResourceError:
    return not_writable(
        Path(error.filename or path), error, "choose a folder you may write to with --run-dir"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
