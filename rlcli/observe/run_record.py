"""The durable record of a run: the last committed step, and whether its models are complete.

It is kept in committed.json, apart from status.json, which changes with every step and describes
the current state.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlcli.api.run_folder import COMMITTED, STATUS
from rlcli.files import known_object, read_text, replace_file, sync_folder

log = logging.getLogger(__name__)

RUN_ID = re.compile(r"\(run ([0-9a-f]{32})\)")
"""The run's id in README.md."""


@dataclass(frozen=True)
class Committed:
    """The content of committed.json."""

    run_id: str
    step: int | None = None
    """Step of the last committed checkpoint; None: there was none yet."""
    is_done: bool = False
    """All steps are done, and the models in models/ are complete."""


class Record:
    """Keeps committed.json up to date. Checkpoints are committed in threads other than the
    master's."""

    def __init__(self, folder: Path, run_id: str):
        self._file = folder / COMMITTED
        self._lock = threading.Lock()
        committed = read_committed(folder)
        self.is_lost = committed is None or committed.run_id != run_id
        """The record written at the start of the run is missing, unreadable or another run's."""
        self._known = Committed(run_id) if committed is None or self.is_lost else committed

    @property
    def step(self) -> int | None:
        """The last committed step."""
        return self._known.step

    @property
    def is_done(self) -> bool:
        """Whether the run has done all its steps, and saved its models."""
        return self._known.is_done

    def update(self, **changes: Any) -> None:
        """Record changes; they are on disk when this returns. Raises OSError."""
        with self._lock:
            updated = replace(self._known, **changes)
            if updated != self._known or self.is_lost:
                replace_file(self._file, (json.dumps(asdict(updated)) + "\n").encode())
                sync_folder(self._file.parent)
                self._known, self.is_lost = updated, False


def read_committed(folder: Path) -> Committed | None:
    """The content of the file; None if it is missing or cannot be read."""
    fields = known_object(folder / COMMITTED)
    if fields.keys() != Committed.__dataclass_fields__.keys():
        return None
    committed = Committed(**fields)
    is_valid = (
        isinstance(committed.run_id, str)
        and committed.run_id
        and isinstance(committed.is_done, bool)
    )
    return committed if is_valid and (committed.step is None or _is_count(committed.step)) else None


def read_status(folder: Path | str) -> dict[str, Any] | None:
    """The content of status.json; None if the folder is not that of a run.

    If that file is missing, unreadable or, as the others agree, another run's: a warning, and what
    the other files say. Its `state` is then `done` or `unknown`.
    """
    file = Path(folder) / STATUS
    status, committed = known_object(file), read_committed(file.parent)
    named = _run_id_of_readme(file.parent)
    others_agree = committed is not None and committed.run_id == named
    is_whole = _is_status(status)
    if is_whole and not (others_agree and status["run_id"] != named):
        return status
    if committed is None and named is not None:
        committed = Committed(named)
    if committed is None:
        return None
    fault = "is that of another run" if is_whole else _why_unread(file)
    return _status_of(committed, f"{file} {fault}")


def _why_unread(file: Path) -> str:
    return "cannot be read" if os.path.lexists(file) else "is missing"


def _status_of(committed: Committed, problem: str) -> dict[str, Any]:
    """The status of a run whose status.json is of no use; warns of that."""
    step = committed.step or 0
    state, steps = ("done", step) if committed.is_done else ("unknown", None)
    _warn_once(f"{problem}; other files of the run say: {state}, step {step} is committed")
    return {"run_id": committed.run_id, "state": state, "step": step, "steps": steps}


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def _is_status(fields: dict[str, Any]) -> bool:
    run_id, steps = fields.get("run_id"), fields.get("steps")
    is_named = isinstance(run_id, str) and run_id != "" and isinstance(fields.get("state"), str)
    return is_named and _is_count(fields.get("step")) and (steps is None or _is_count(steps))


def _run_id_of_readme(folder: Path) -> str | None:
    try:
        match = RUN_ID.search(read_text(folder / "README.md", 1 << 20))
    except OSError:
        return None
    return match[1] if match else None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
