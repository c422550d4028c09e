"""Committing a checkpoint: whole or not at all, whatever dies and whenever.

Files are written into a folder beside the checkpoints, synced and digested by the ranks that wrote them. The manifest
comes last, and one rename makes the checkpoint appear. What dies on the way leaves the older checkpoints as they were,
and a `.tmp-` folder that the next save clears away.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcli.checkpoint.manifest import MANIFEST, FileDigest, Manifest
from rlcli.errors import ResourceError
from rlcli.files import make_folder, replace_file

LATEST = "LATEST.json"
"""Names the newest checkpoint. A hint for people and scripts: what a folder holds is told by its manifest alone."""
TEMPORARY, DOOMED = ".tmp-", ".del-"
FULL = {errno.ENOSPC: "F28", errno.EDQUOT: "F76", errno.EFBIG: "F28", errno.EIO: "F29", errno.EROFS: "F75",
        errno.EACCES: "F75", errno.EPERM: "F75"}  # fmt: skip


def folder_name(step: int) -> str:
    """`step-000000000040`: sorts as the numbers do."""
    return f"step-{step:012d}"


def begin(checkpoints: Path, step: int, run_id: str) -> Path:
    """Make the folder that the files of a checkpoint are written into, empty. Raises ResourceError."""
    with _said_clearly(checkpoints):
        make_folder(checkpoints)
        clear_leftovers(checkpoints)
        temporary = checkpoints / f"{TEMPORARY}{step}-{run_id}"
        temporary.mkdir(mode=0o700)
        return temporary


def seal(folder: Path, files: Iterable[Path]) -> list[FileDigest]:
    """Have files on disk, and digest what is there now. Every rank does it for its own. Raises ResourceError."""
    with _said_clearly(folder):
        return [_sealed(folder, file) for file in files]


def write_json(file: Path, value: Any) -> Path:
    """A JSON file of a checkpoint, with every float to its last bit; it still has to be sealed."""
    file.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return file


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Make a checkpoint of a folder whose files are all sealed; returns its new path. Raises ResourceError.

    A checkpoint of the same step that was there before, left by a run that went on from an earlier one, is replaced.
    """
    checkpoints = temporary.parent
    final = checkpoints / folder_name(manifest.step)
    there = {file.relative_to(temporary).as_posix() for file in temporary.rglob("*") if not file.is_dir()}
    if there != set(manifest.files):
        odd = min(there ^ set(manifest.files))
        raise ResourceError(f"the ranks and the disk disagree about {odd}", where=str(temporary), code="F28")
    with _said_clearly(temporary):
        _sealed(temporary, write_json(temporary / MANIFEST, manifest.as_json()))
        for folder in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
            _sync_folder(folder)
        if final.exists():
            final.rename(checkpoints / f"{DOOMED}{final.name}-{os.getpid()}")
        temporary.rename(final)
        _sync_folder(checkpoints)
        replace_file(checkpoints / LATEST, json.dumps({"checkpoint": final.name, "step": manifest.step}).encode())
        _sync_folder(checkpoints)
    return final


def abandon(temporary: Path) -> None:
    """Give back the room of a save that failed."""
    shutil.rmtree(temporary, ignore_errors=True)


def clear_leftovers(checkpoints: Path) -> None:
    """Remove what saves and deletions that died have left. Only one run at a time writes here: it holds the lock."""
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        if path.name.startswith((TEMPORARY, DOOMED)):
            shutil.rmtree(path, ignore_errors=True)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint: it stops being one in a single rename, before its first file goes."""
    doomed = checkpoint.with_name(f"{DOOMED}{checkpoint.name}-{os.getpid()}")
    with _said_clearly(checkpoint):
        checkpoint.rename(doomed)
        _sync_folder(checkpoint.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def check_free_space(checkpoints: Path, needed: int) -> None:
    """Raises ResourceError F28 if a checkpoint of so many bytes does not fit on the disk."""
    folder = checkpoints
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"a checkpoint needs {needed / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free",
            where=str(checkpoints),
            hint="make room, or set checkpoint.every_seconds=null checkpoint.at_end=false checkpoint.on_stop=false",
            code="F28",
        )


def _sealed(folder: Path, file: Path) -> FileDigest:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as opened:
        os.fsync(descriptor)
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return FileDigest(file.relative_to(folder).as_posix(), os.fstat(descriptor).st_size, digest)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _said_clearly(place: Path) -> Iterator[None]:
    """A disk that fails, as ResourceError with the place and the id of the fault."""
    try:
        yield
    except OSError as error:
        code = FULL.get(error.errno or 0, "F28")
        raise ResourceError(error.strerror or str(error), where=str(error.filename or place), code=code) from error
