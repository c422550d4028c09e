"""The state of a run, from its files: state, step, last metrics, and its machine."""

from __future__ import annotations

import json
import logging
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rlcli.api.run_folder import LOCK, PROCESSES
from rlcli.files import known_object, read_regular, replace_file
from rlcli.observe.metrics import NONFINITE
from rlcli.observe.run_lock import Holder, process_record, read_holder
from rlcli.observe.run_record import read_status
from rlcli.observe.series import find_key, number
from rlcli.observe.tail import Tail
from rlcli.processes import ProcessRecord

log = logging.getLogger(__name__)

UNDER_WAY = ("starting", "running", "stopping")
"""Transient states, as the run writes them."""
AHEAD = ("submitted", "waiting", "paused")
"""States of a run whose job has not begun, or is paused."""
STOP = "stop.json"
"""File that names the process that was asked to stop the run."""
DIED = "died"
"""State of a run that claims to be in progress while its processes are gone."""
STYLES = {"running": "green", "done": "green", "failed": "red", DIED: "red"}
TELLING = ("reward", "loss")
"""Curves whose last value a list shows: the first one that a run has."""
LARGEST_RECORDS = 1 << 22
"""Maximum size of procs.json, in bytes."""


@dataclass(frozen=True)
class Overview:
    """What is known of a run."""

    folder: Path
    state: str
    """The state in status.json, or `died`."""
    step: int
    steps: int | None
    last: Mapping[str, float]
    """The metrics of the last step."""
    holder: Holder | None
    host: str | None
    """The machine on which its master runs, or ran."""
    started: str | None
    updated: float | None
    """When it last wrote its status, in seconds since the epoch."""
    exit_code: int | None
    message: str | None
    """Error of a failed run, or why a run is waiting."""
    job: str | None = None
    """The scheduler's id of its job, if it is one."""
    nodes: str | None = None
    """The nodes of its job, or those it had last, as the scheduler names them."""

    @property
    def is_under_way(self) -> bool:
        """Whether it is running, or will run without any action."""
        return self.state in (*UNDER_WAY, *AHEAD)

    @property
    def steps_done(self) -> str:
        """`41/80`."""
        return str(self.step) if self.steps is None else f"{self.step}/{self.steps}"

    @property
    def style(self) -> str:
        """The style in which its state is written."""
        return STYLES.get(self.state, "yellow")

    @property
    def telling(self) -> tuple[str, float] | None:
        """The most informative metric, with its name."""
        for name in TELLING:
            key = find_key(self.last, name)
            if key is not None:
                return name, self.last[key]
        return None

    @property
    def is_here(self) -> bool:
        """Whether the run is on this machine."""
        return self.host == socket.gethostname()

    @property
    def age(self) -> float | None:
        """Seconds since it last wrote its status, by two clocks if that was on another machine."""
        return max(0.0, time.time() - self.updated) if self.updated is not None else None


def read_overview(folder: Path) -> Overview | None:
    """The state of the run in a folder; None if there is none."""
    status = read_status(folder)
    if status is None:
        return None
    holder = read_holder(folder / LOCK)
    state = str(status["state"])
    if state in UNDER_WAY and holder is not None:
        is_gone = holder.owner.is_here and not holder.is_alive()
        state = DIED if is_gone else "stopping" if is_asked_to_stop(folder, holder) else state
    code = status.get("exit_code")
    host = holder.owner.host if holder is not None else _text(status.get("host"))
    return Overview(
        folder=folder,
        state=state,
        step=status["step"],
        steps=status.get("steps"),
        last=last_numbers(folder / "metrics.jsonl"),
        holder=holder,
        host=host,
        started=_text(status.get("started")),
        updated=_moment(status.get("updated")),
        exit_code=code if type(code) is int else None,
        message=_text(status.get("message")),
    )


def is_asked_to_stop(folder: Path, holder: Holder) -> bool:
    """Whether `note_stop` has been called for this start of the run."""
    return process_record(known_object(folder / STOP)) == holder.owner


def note_stop(folder: Path, holder: Holder) -> None:
    """Record that this start of the run was asked to stop: asking again would end it at once. A
    disk that is full does not keep a run from being stopped."""
    try:
        replace_file(folder / STOP, (json.dumps(asdict(holder.owner)) + "\n").encode())
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): asking again ends the run at once",
            folder / STOP,
            error.strerror or error,
        )


def read_processes(folder: Path) -> list[tuple[str, ProcessRecord]]:
    """Names and processes that a launcher started for the run the last time."""
    try:
        recorded = json.loads(read_regular(folder / PROCESSES, LARGEST_RECORDS))
    except (OSError, ValueError, RecursionError):
        return []
    entries = (
        [entry for entry in recorded if isinstance(entry, dict)]
        if isinstance(recorded, list)
        else []
    )
    processes = [(str(entry.get("name")), process_record(entry)) for entry in entries]
    return [(name, process) for name, process in processes if process is not None]


def last_numbers(metrics: Path) -> dict[str, float]:
    """The metrics in the last whole line of a metrics.jsonl; empty if it cannot be read."""
    try:
        record = json.loads(line[0]) if (line := Tail(metrics).last(1)) else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    lost = record.pop(NONFINITE, None)
    numbers = {key: value for key in record if (value := number(record[key])) is not None}
    return numbers | dict.fromkeys(lost if isinstance(lost, dict) else (), math.nan)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _moment(value: Any) -> float | None:
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
