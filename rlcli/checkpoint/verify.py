"""Which checkpoints exist, and whether they are whole: judged by digests, never by a name.

Nothing is loaded before its digest was computed and found right. For a run that resumes, the ranks
do that, each for a part of the files (see `runtime.checkpoints`): the master compares names and
sizes, which finds what is incomplete.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Literal

from rlcli.api.headway import BYTES, Headway, doing
from rlcli.checkpoint.disk import files_under, open_to_read
from rlcli.checkpoint.manifest import MANIFEST, NEWER_FORMAT, FileDigest, Manifest, read_manifest
from rlcli.disk_errors import explain_disk_errors
from rlcli.errors import ModelError
from rlcli.processes import allowed_cores

SUPERSEDED = ".old-"
"""Name prefix of a checkpoint that is being replaced by one of the same step; it counts until the
new one exists."""
NAME = re.compile(rf"(?:{re.escape(SUPERSEDED)})?step-(?P<step>\d{{12}})")
PART = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")
"""Name of a file with a rank's parts: the rank, counted from 1, and the number of the file among
those of the rank."""
BLOCK = 1 << 20
"""Bytes that are read at a time."""
State = Literal["ok", "incomplete", "corrupt"]
THREADS = allowed_cores()
"""Files that are read at the same time, unless the process is one of several that share the
machine."""


@dataclass(frozen=True)
class CompleteCheckpoint:
    """A checkpoint whose manifest is valid, and whose files exist with the right sizes. Whoever
    loads one of them must know that its content was verified too."""

    path: Path
    manifest: Manifest
    strangers: tuple[str, ...] = ()
    """Files that the manifest does not know; nothing reads them."""


@dataclass(frozen=True)
class CheckpointReport:
    """What was found in the folder of a checkpoint."""

    path: Path
    manifest: Manifest | None
    faults: tuple[ModelError, ...]
    """One for each file that is not as it was written."""
    strangers: tuple[str, ...] = ()

    @property
    def step(self) -> int | None:
        """The step in its manifest, or else in its name."""
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
    """Everything named like a checkpoint, newest first. Raises ResourceError if the folder cannot
    be read."""
    with explain_disk_errors(folder):
        named = {
            path.name: path
            for path in (folder.iterdir() if folder.is_dir() else ())
            if NAME.fullmatch(path.name)
        }
    needed = [
        path
        for name, path in named.items()
        if name.removeprefix(SUPERSEDED) not in named.keys() - {name}
    ]
    return sorted(needed, key=lambda path: path.name.removeprefix(SUPERSEDED), reverse=True)


def examine(
    checkpoint: Path, *, run_id: str | None = None, read: bool = True, under: str = ""
) -> CheckpointReport:
    """Everything that is wrong with a checkpoint, reading every byte; without `read` only names and
    sizes are compared.

    `run_id`: the run that it must belong to. `under`:
    only files whose paths begin with it are examined.
    """
    try:
        if checkpoint.is_symlink():
            raise ModelError("it is a link", where=str(checkpoint), code="F20")
        manifest = read_manifest(checkpoint)
        _check_belongs(checkpoint, manifest, run_id)
    except ModelError as error:
        return CheckpointReport(checkpoint, None, (error,))
    paths = files_under(checkpoint)
    selected = [file for file in manifest.files.values() if file.path.startswith(under)]
    incomplete = {
        file.path: fault for file in selected if (fault := _incomplete(checkpoint, file, paths))
    }
    complete = [file for file in selected if file.path not in incomplete]
    damaged = damaged_files(checkpoint, complete, THREADS) if read else []
    strangers = tuple(sorted(paths.keys() - {*manifest.files, MANIFEST}))
    return CheckpointReport(checkpoint, manifest, (*incomplete.values(), *damaged), strangers)


def damaged_files(checkpoint: Path, files: Iterable[FileDigest], threads: int) -> list[ModelError]:
    """What is wrong with files of a checkpoint, reading every byte of them."""
    files = list(files)
    phase = f"verifying {checkpoint.name}"
    with (
        doing(phase, sum(file.bytes for file in files), BYTES) as work,
        ThreadPoolExecutor(max(1, threads)) as pool,
    ):
        faults = list(pool.map(lambda file: _damage(checkpoint, file, work), files))
    return [fault for fault in faults if fault]


def writer_of(path: str) -> int | None:
    """The rank that wrote a file of a checkpoint, if its name says so."""
    named = PART.fullmatch(path.rpartition("/")[2])
    return int(named[1]) - 1 if named else None


def shared_out(files: Iterable[FileDigest], world_size: int) -> list[list[FileDigest]]:
    """The files that each rank verifies: those that a rank of its number wrote, which it reads next
    if the layout is the same; the others go to whoever has least to read.
    So every byte is read once."""
    shares: list[list[FileDigest]] = [[] for _ in range(world_size)]
    sizes = [0] * world_size
    unassigned = []
    for file in sorted(files, key=lambda file: (-file.bytes, file.path)):
        writer = writer_of(file.path)
        if writer is None or writer >= world_size:
            unassigned.append(file)
            continue
        shares[writer].append(file)
        sizes[writer] += file.bytes
    for file in unassigned:
        rank = sizes.index(min(sizes))
        shares[rank].append(file)
        sizes[rank] += file.bytes
    return shares


def verify(checkpoint: Path, run_id: str | None = None) -> CompleteCheckpoint:
    """Read every byte of a checkpoint. Raises ModelError with the file that is missing, short,
    changed or a link."""
    return _checked(checkpoint, run_id, read=True)


def _checked(checkpoint: Path, run_id: str | None, read: bool) -> CompleteCheckpoint:
    report = examine(checkpoint, run_id=run_id, read=read)
    if report.manifest is None or report.faults:
        raise report.faults[0]
    return CompleteCheckpoint(checkpoint, report.manifest, report.strangers)


def newest_verified(
    folder: Path, run_id: str | None = None
) -> tuple[CompleteCheckpoint | None, list[ModelError]]:
    """The newest checkpoint that is whole, and why each newer one is not.

    Raises ModelError F85 for one that a newer rlcli wrote: it is not damaged,
    and must not be passed over.
    """
    rejected: dict[Path, ModelError] = {}
    return _newest(folder, run_id, rejected, read=True), [*rejected.values()]


def newest_complete(
    folder: Path, run_id: str, rejected: dict[Path, ModelError]
) -> CompleteCheckpoint | None:
    """The newest checkpoint whose files exist with the right sizes, apart from those that are
    `rejected`; why each newer one is not complete is added to these. Raises ModelError F85 as
    `newest_verified` does."""
    return _newest(folder, run_id, rejected, read=False)


def _newest(
    folder: Path, run_id: str | None, rejected: dict[Path, ModelError], read: bool
) -> CompleteCheckpoint | None:
    for path in checkpoints_in(folder):
        if path not in rejected:
            try:
                return _checked(path, run_id, read)
            except ModelError as error:
                if error.code == NEWER_FORMAT:
                    raise
                rejected[path] = error
    return None


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
        raise ModelError(
            f"its manifest is of step {manifest.step}", where=str(checkpoint), code="F19"
        )
    if run_id is not None and manifest.run_id != run_id:
        message = f"it belongs to run {manifest.run_id}, and this is run {run_id}"
        raise ModelError(message, where=str(checkpoint), code="F19")


def _incomplete(checkpoint: Path, file: FileDigest, paths: dict[str, Path]) -> ModelError | None:
    """What is wrong with a file, judged by its name and size."""
    if file.path not in paths:  # it may be behind a link, which is not followed
        return ModelError("it is missing", where=str(checkpoint / file.path), code="F20")
    return _damage(checkpoint, file)


def _damage(checkpoint: Path, file: FileDigest, work: Headway | None = None) -> ModelError | None:
    """What is wrong with an existing file; without `work`, which counts the bytes that are read,
    only its size is looked at."""
    path = checkpoint / file.path
    try:
        with os.fdopen(open_to_read(path), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.bytes:
                return ModelError(
                    f"size {size}, the manifest says {file.bytes}", where=str(path), code="F17"
                )
            if work is not None and _digest(opened, work) != file.sha256:
                return ModelError(
                    "its content has changed since it was written", where=str(path), code="F18"
                )
    except OSError as error:
        link = error.errno == errno.ELOOP
        message = "it is a link" if link else f"it cannot be read: {error.strerror}"
        return ModelError(message, where=str(path), code="F20" if link else "F29")
    return None


def _digest(opened: BufferedReader, work: Headway) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    while count := opened.readinto(block):
        digest.update(block[:count])
        work.advance(count)
    return digest.hexdigest()
