"""Results of finished runs that other runs can start from,
and interrupted runs that would have had one."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import HangError, Stopped, WorkerError
from rlcli.files import read_regular
from rlcli.observe.run_overview import DIED, UNDER_WAY, Overview, read_overview
from rlcli.observe.run_record import read_committed, read_status
from rlcli.project import planted
from rlcli.recipe.warm_start import warm_starts

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved

log = logging.getLogger(__name__)

DIGEST_FILE = "recipe.digest"
AT_ONCE = (128 + signal.SIGINT, 128 + signal.SIGTERM)
INTERRUPTED = (Stopped.exit_code, WorkerError.exit_code, HangError.exit_code, *AT_ONCE)
"""Exit codes of runs that were asked to stop, lost a process, passed a deadline, or got Ctrl-C or a
second SIGTERM, as from `rlcli stop --now`."""
SILENT = 600.0
"""Seconds after which a run on another machine that writes nothing counts as dead."""


def runs_first(resolved: Resolved, log_dir: str) -> list[Resolved]:
    """The recipes that it starts from and whose results do not exist yet,
    in the order to run them."""
    missing = [
        start.source
        for start in warm_starts(resolved)
        if find_result(start.source, log_dir, start.source_role) is None
    ]
    return [first for source in missing for first in (*runs_first(source, log_dir), source)]


def find_result(source: Resolved, log_dir: str, role: str) -> Path | None:
    """The folder of a role's saved model in the newest finished run of exactly this recipe,
    if there is one."""
    for run in _runs_of(source, log_dir, f"models/{role}/config.json"):
        status = read_status(run)
        if (
            status is not None
            and status["state"] == "done"
            and (run / "models" / role / "config.json").is_file()
        ):
            return (run / "models" / role).absolute()
    return None


def find_interrupted(source: Resolved, log_dir: str) -> Path | None:
    """The newest run of exactly this recipe that was interrupted and has a checkpoint,
    if there is one."""
    for run in _runs_of(source, log_dir, "committed.json"):
        overview, committed = read_overview(run), read_committed(run)
        has_checkpoint = committed is not None and committed.step is not None
        if has_checkpoint and overview is not None and _was_interrupted(overview):
            return run
    return None


def _runs_of(source: Resolved, log_dir: str, file: str) -> Iterator[Path]:
    """The runs of exactly this recipe, newest first;
    not those in which another user may have written `file`."""
    recipe_digest = digest(source)
    for marker in sorted(Path(log_dir, source.recipe.name).glob(f"*/{DIGEST_FILE}"), reverse=True):
        if planted(marker.parent / file) is not None or planted(marker) is not None:
            log.warning(
                "%s is left out: another user has put it into a folder that all may write to",
                marker.parent,
            )
        elif recorded_digest(marker.parent) == recipe_digest:
            yield marker.parent


def recorded_digest(run: Path) -> str | None:
    """The digest of the recipe that a run began with; None if there is none,
    or none that can be read."""
    try:
        text = read_regular(run / DIGEST_FILE, 1024).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if re.fullmatch("[0-9a-f]{64}", text) else None


def _was_interrupted(run: Overview) -> bool:
    """Whether it was stopped or died. The processes of another machine cannot be looked up:
    there, silence counts."""
    if run.state in UNDER_WAY:
        return not run.is_here and (run.age or 0.0) > SILENT
    return run.state == DIED or run.exit_code in INTERRUPTED


def digest(resolved: Resolved) -> str:
    """Digest of everything in a recipe that its result depends on."""
    relevant = {
        key: value
        for key, value in resolved.to_json().items()
        if key not in ("launch", "log", "checkpoint")
    }
    relevant["starts"] = {
        start.role: [digest(start.source), start.source_role] for start in warm_starts(resolved)
    }
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()
