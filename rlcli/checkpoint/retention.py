"""Which checkpoints stay: the newest, the best, and always the last one that is whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlcli.checkpoint.commit import LATEST, clear_leftovers, remove
from rlcli.checkpoint.manifest import read_manifest
from rlcli.checkpoint.verify import checkpoints_in, newest_verified
from rlcli.errors import ModelError


@dataclass(frozen=True)
class Best:
    """Keep the `count` checkpoints with the highest or lowest value of a metric."""

    metric: str
    which: Literal["highest", "lowest"]
    count: int


def prune(folder: Path, keep_last: int, keep_best: Best | None = None, dry_run: bool = False) -> list[Path]:
    """Delete all checkpoints but those that stay; returns the deleted ones. Raises ResourceError.

    Judged by what is on the disk. Whatever the numbers say, the one that LATEST names and the newest whole one stay.
    """
    candidates = checkpoints_in(folder)
    stay = {path.name for path in (*candidates[:keep_last], *_best(candidates, keep_best))}
    stay |= {_latest(folder)}
    doomed = [path for path in candidates if path.name not in stay]
    if doomed and not any(_is_whole(path) for path in candidates if path.name in stay):
        last, _ = newest_verified(folder)
        doomed = [path for path in doomed if last is None or path != last.path]
    if not dry_run:
        for path in reversed(doomed):
            remove(path)
        clear_leftovers(folder)
    return doomed


def _best(candidates: Sequence[Path], best: Best | None) -> list[Path]:
    if best is None:
        return []
    scored = []
    for path in candidates:
        try:
            score = read_manifest(path).metrics.get(best.metric)
        except ModelError:
            continue
        if score is not None:
            scored.append((score if best.which == "highest" else -score, path.name, path))
    return [path for *_, path in sorted(scored, reverse=True)[: best.count]]


def _latest(folder: Path) -> str:
    try:
        return str(json.loads((folder / LATEST).read_bytes())["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _is_whole(path: Path) -> bool:
    """By its manifest and the sizes of its files: all its bytes were read when it was committed."""
    try:
        files = read_manifest(path).files
        return all((path / name).stat().st_size == file.bytes for name, file in files.items())
    except (ModelError, OSError):
        return False
