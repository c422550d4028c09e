"""What finished runs have left for others to start from."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.observe.run_record import read_status
from rlcli.project import planted
from rlcli.recipe.warm_start import warm_starts

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved

log = logging.getLogger(__name__)

DIGEST_FILE = "recipe.digest"


def runs_first(resolved: Resolved, log_dir: str) -> list[Resolved]:
    """The recipes that it starts from whose results are not there yet, in the order to run them."""
    missing = [one.source for one in warm_starts(resolved) if find_result(one.source, log_dir, one.source_role) is None]
    return [first for source in missing for first in (*runs_first(source, log_dir), source)]


def find_result(source: Resolved, log_dir: str, role: str) -> Path | None:
    """The newest finished run of exactly this recipe, if there is one: the folder of a role's saved model."""
    wanted = digest(source)
    for marker in sorted(Path(log_dir, source.recipe.name).glob(f"*/{DIGEST_FILE}"), reverse=True):
        folder = marker.parent / "models" / role
        if planted(folder / "config.json") is not None or planted(marker) is not None:
            log.warning("%s is left out: another user has put it into a folder that all may write to", marker.parent)
        elif (folder / "config.json").is_file() and marker.read_text().strip() == wanted:
            status = read_status(marker.parent)
            if status is not None and status["state"] == "done":
                return folder.absolute()
    return None


def digest(resolved: Resolved) -> str:
    """Of everything in a recipe that its result depends on."""
    told = {key: value for key, value in resolved.to_json().items() if key not in ("launch", "log", "checkpoint")}
    told["starts"] = {start.role: [digest(start.source), start.source_role] for start in warm_starts(resolved)}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
