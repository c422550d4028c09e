"""Trackio: a database on this machine (`TRACKIO_DIR`), a Space of the Hub (`TRACKIO_SPACE_ID`) or a
server (`TRACKIO_SERVER_URL`)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcli.observe.trackers.contract import SAMPLE_COLUMNS, TrackedRun, Update, sample_row
from rlcli.observe.trackers.redaction import bare_address


class TrackioTracker:
    """Runs go by their names. The run of a local database whose steps are repeated is replaced;
    elsewhere it gets a new name."""

    def __init__(self) -> None:
        self._run: Any = None
        self._last_step = 0
        self._rows = 0
        """Rows that the database must have at the end."""
        self._suffix = ""

    def continues(self, run: TrackedRun, entry: str) -> bool:
        return entry.startswith(f"{_store()} ")

    def open(self, run: TrackedRun, entry: str | None) -> str:
        import trackio

        name = f"{run.name}{self._suffix}" if entry is None else entry.rpartition(" ")[2]
        self._run = trackio.init(
            project=run.project,
            name=name,
            group=run.group,
            config={**run.settings, "origins": dict(run.origins), "tags": list(run.tags)},
            resume="never" if entry is None else "must",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._rows = self._stored_rows()
        return f"{_store()} {name}"

    def discard(self, run: TrackedRun, entry: str) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        if _remote() is not None:
            self._suffix = f"-{secrets.token_hex(2)}"
        elif self.continues(run, entry):
            SQLiteStorage.delete_run(run.project, entry.rpartition(" ")[2])

    def write(self, updates: Sequence[Update]) -> None:
        import trackio

        for update in updates:
            values: dict[str, Any] = dict(update.numbers)
            for phase, samples in update.samples_by_phase().items():
                rows = [list(sample_row(sample)) for sample in samples]
                values[f"samples/{phase}"] = trackio.Table(columns=list(SAMPLE_COLUMNS), data=rows)
            self._log(values, update.step)
            self._last_step = max(self._last_step, update.step)

    def close(self, state: str, curve: Path | None) -> None:
        import trackio

        if curve is not None:
            self._log({"curve": trackio.Image(str(curve))}, self._last_step)
        self._run.finish()
        # what it cannot write it reports as Python's warnings, and drops
        if _remote() is None and (stored := self._stored_rows()) != self._rows:
            raise RuntimeError(f"Trackio has stored {stored} of {self._rows} rows")

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._run.log(values, step=step)
        self._rows += 1

    def _stored_rows(self) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        return int(SQLiteStorage.get_log_count(self._run.project, self._run.name))


def _remote() -> str | None:
    return os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")


def _store() -> str:
    from trackio.utils import TRACKIO_DIR

    return bare_address(_remote() or str(TRACKIO_DIR))
