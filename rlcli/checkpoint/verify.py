"""Which checkpoints exist, and whether they are whole: judged by digests, never by a name."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlcli.checkpoint.disk import explain_disk_errors, files_under, open_to_read
from rlcli.checkpoint.manifest import MANIFEST, NEWER_FORMAT, FileDigest, Manifest, read_manifest
from rlcli.errors import ModelError

SUPERSEDED = ".old-"
"""Name prefix of a checkpoint that made way for a new one of the same step; it counts until the new one exists."""
NAME = re.compile(rf"(?:{re.escape(SUPERSEDED)})?step-(?P<step>\d{{12}})")
State = Literal["ok", "incomplete", "corrupt"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte was found to match its manifest."""

    path: Path
    manifest: Manifest
    strangers: tuple[str, ...] = ()
    """Files that the manifest does not know; nothing reads them."""


@dataclass(frozen=True)
class Report:
    """What was found in the folder of a checkpoint."""

    path: Path
    manifest: Manifest | None
    faults: tuple[ModelError, ...]
    """One for each file that is not as it was written."""
    strangers: tuple[str, ...] = ()

    @property
    def step(self) -> int | None:
        """The step that its manifest or else its name tells."""
        return self.manifest.step if self.manifest is not None else step_of(self.path)

    @property
    def state(self) -> State:
        """`incomplete`: something is missing altogether."""
        missing = any(fault.code == "F20" for fault in self.faults)
        return "incomplete" if missing else "corrupt" if self.faults else "ok"


def step_of(checkpoint: Path) -> int | None:
    """The step in its name."""
    named = NAME.fullmatch(checkpoint.name)
    return int(named["step"]) if named else None


def checkpoints_in(folder: Path) -> list[Path]:
    """Everything named like a checkpoint, newest first. Raises ResourceError if the folder cannot be read."""
    with explain_disk_errors(folder):
        named = {path.name: path for path in (folder.iterdir() if folder.is_dir() else ()) if NAME.fullmatch(path.name)}
    needed = [path for name, path in named.items() if name.removeprefix(SUPERSEDED) not in named.keys() - {name}]
    return sorted(needed, key=lambda path: path.name.removeprefix(SUPERSEDED), reverse=True)


def examine(checkpoint: Path, *, run_id: str | None = None, read: bool = True, under: str = "") -> Report:
    """Everything that is wrong with a checkpoint, reading every byte; without `read` only names and sizes are compared.

    `run_id`: the run that it must belong to. `under`: only files whose paths begin with it are examined.
    """
    try:
        if checkpoint.is_symlink():
            raise ModelError("it is a link", where=str(checkpoint), code="F20")
        manifest = read_manifest(checkpoint)
        _check_belongs(checkpoint, manifest, run_id)
    except ModelError as error:
        return Report(checkpoint, None, (error,))
    there = files_under(checkpoint)
    wanted = (file for file in manifest.files.values() if file.path.startswith(under))
    found = (_fault(checkpoint, file, there, read) for file in wanted)
    strangers = tuple(sorted(there.keys() - {*manifest.files, MANIFEST}))
    return Report(checkpoint, manifest, tuple(fault for fault in found if fault), strangers)


def verify(checkpoint: Path, run_id: str | None = None) -> Checkpoint:
    """Read every byte of a checkpoint. Raises ModelError with the file that is missing, short, changed or a link."""
    report = examine(checkpoint, run_id=run_id)
    if report.manifest is None or report.faults:
        raise report.faults[0]
    return Checkpoint(checkpoint, report.manifest, report.strangers)


def newest_verified(folder: Path, run_id: str | None = None) -> tuple[Checkpoint | None, list[ModelError]]:
    """The newest checkpoint that is whole, and why each newer one is not.

    Raises ModelError F85 for one that a newer rlcli wrote: it is not damaged, and must not be passed over.
    """
    rejected: list[ModelError] = []
    for path in checkpoints_in(folder):
        try:
            return verify(path, run_id), rejected
        except ModelError as error:
            if error.code == NEWER_FORMAT:
                raise
            rejected.append(error)
    return None, rejected


def belongs(path: Path, run_id: str) -> bool:
    """Whether a manifest says that this is a checkpoint of the run, whole or not."""
    if path.is_symlink():
        return False
    try:
        _check_belongs(path, read_manifest(path), run_id)
    except ModelError:
        return False
    return True


def _check_belongs(checkpoint: Path, manifest: Manifest, run_id: str | None) -> None:
    """Refuse a folder copied from elsewhere: its name must not be trusted."""
    named = NAME.fullmatch(checkpoint.name)
    if named and int(named["step"]) != manifest.step:
        raise ModelError(f"its manifest is of step {manifest.step}", where=str(checkpoint), code="F19")
    if run_id is not None and manifest.run_id != run_id:
        what = f"it belongs to run {manifest.run_id}, and this is run {run_id}"
        raise ModelError(what, where=str(checkpoint), code="F19")


def _fault(checkpoint: Path, file: FileDigest, there: dict[str, Path], read: bool) -> ModelError | None:
    """What is wrong with a file, if anything is."""
    path = checkpoint / file.path
    if file.path not in there:  # it may be behind a link, which is not followed
        return ModelError("it is missing", where=str(path), code="F20")
    try:
        with os.fdopen(open_to_read(path), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.bytes:
                return ModelError(f"size {size}, the manifest says {file.bytes}", where=str(path), code="F17")
            if read and hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                return ModelError("its content is not what was written", where=str(path), code="F18")
    except OSError as error:
        link = error.errno == errno.ELOOP
        what = "it is a link" if link else f"it cannot be read: {error.strerror}"
        return ModelError(what, where=str(path), code="F20" if link else "F29")
    return None
