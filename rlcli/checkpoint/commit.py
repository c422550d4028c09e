"""Committing a checkpoint: whole or not at all, whatever process dies and whenever.

Files are written into a folder next to the checkpoints, synced and digested by the ranks that wrote
them. The manifest comes last, and one rename makes the checkpoint appear. A process that dies on
the way leaves the older checkpoints as they were, and a `.tmp-` folder that the next save of the
run removes.

Only what is known to be the run's own is ever deleted: checkpoints whose manifest says so, and
folders that carry its id.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcli.checkpoint.disk import check_free_space, discard, exchange, files_under, open_to_read
from rlcli.checkpoint.manifest import MANIFEST, FileDigest, Manifest, read_manifest
from rlcli.checkpoint.verify import SUPERSEDED, belongs
from rlcli.disk_errors import explain_disk_errors
from rlcli.errors import ResourceError
from rlcli.failpoints import failpoint
from rlcli.files import make_folder, replace_file, sync_folder

LATEST = "LATEST.json"
"""Names the newest checkpoint. A hint for people and scripts:
only its manifest says what a folder holds."""
TEMPORARY, DELETING = ".tmp-", ".del-"
"""Name prefixes of folders that are being written or deleted; the run's id is part of the name."""
IN_THE_WAY = ".not-of-"
"""Precedes the run's id in the new name of anything that already had the name of one of its
checkpoints."""
LATE = 10.0
"""Seconds to wait for files that other ranks have written and this one does not see yet."""


def folder_name(step: int) -> str:
    """`step-000000000040`: sorts numerically."""
    return f"step-{step:012d}"


def begin(checkpoints: Path, step: int, run_id: str, needed: int = 0) -> Path:
    """Make the empty folder that the files of a checkpoint are written into. Raises ResourceError,
    F28 if `needed` bytes do not fit on the disk.

    Leftovers of the run's failed saves are removed: the run holds its lock,
    so nobody else is writing.
    """
    with explain_disk_errors(checkpoints):
        if not checkpoints.exists():
            make_folder(checkpoints)
            sync_folder(checkpoints.parent)
        clear_leftovers(checkpoints, run_id)
        check_free_space(checkpoints, needed)
        temporary = checkpoints / f"{TEMPORARY}{step}-{run_id}"
        temporary.mkdir(mode=0o700)
        failpoint("checkpoint.begun")
        return temporary


def seal(folder: Path, files: Iterable[Path]) -> list[FileDigest]:
    """Sync files to disk, and digest what they now contain. Every rank does this for its own files.
    Raises ResourceError.

    A file whose sync fails is lost: its state on disk is unknown, and the save must start again.
    """
    with explain_disk_errors(folder):
        return [_sealed(folder, file) for file in files]


def write_json(file: Path, value: Any) -> Path:
    """Write a JSON file of a checkpoint, with every float exact to the last bit;
    it still has to be sealed."""
    file.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return file


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Make a checkpoint of a folder whose files are all sealed; returns its new path.
    Raises ResourceError.

    A checkpoint of the same step that the run made before it resumed from an earlier one is
    replaced atomically: at any moment one of the two exists.
    Anything else with that name is renamed.
    """
    checkpoints = temporary.parent
    final = checkpoints / folder_name(manifest.step)
    with explain_disk_errors(temporary):
        _wait_for_files(temporary, manifest)
        file = temporary / MANIFEST
        file.write_bytes(manifest.as_bytes())
        _sealed(temporary, file)
        for folder in (*(path for path in temporary.rglob("*") if path.is_dir()), temporary):
            sync_folder(folder)
        failpoint("checkpoint.synced")
        _appear(temporary, final, manifest.run_id)
        failpoint("checkpoint.appeared")
    # it is only a hint; if the disk is broken or full, the next save fails
    with contextlib.suppress(OSError):
        latest = {"checkpoint": final.name, "step": manifest.step}
        replace_file(checkpoints / LATEST, (json.dumps(latest) + "\n").encode())
        sync_folder(checkpoints)
    failpoint("checkpoint.committed")
    return final


def add_metrics(checkpoint: Path, metrics: Mapping[str, float]) -> None:
    """Add numbers to those of a checkpoint, which stays as old as it is. Raises ModelError if its
    manifest cannot be read, and ResourceError."""
    manifest, file = read_manifest(checkpoint), checkpoint / MANIFEST
    with explain_disk_errors(checkpoint):
        committed = file.stat()
        added = replace(manifest, metrics={**manifest.metrics, **metrics})
        replace_file(file, added.as_bytes())
        os.utime(file, ns=(committed.st_atime_ns, committed.st_mtime_ns))
        sync_folder(checkpoint)


def abandon(temporary: Path) -> None:
    """Free the disk space of a save that failed."""
    discard(temporary)


def clear_leftovers(checkpoints: Path, run_id: str) -> None:
    """Remove what interrupted saves and deletions of a run left behind,
    and put back what was only set aside."""
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        replaced = path.with_name(path.name.removeprefix(SUPERSEDED))
        if path.name.startswith(SUPERSEDED) and not os.path.lexists(replaced):
            path.rename(replaced)
        elif path.name.startswith(SUPERSEDED) and belongs(path, run_id):
            remove(path, run_id)
        elif is_leftover(path, run_id):
            discard(path)


def is_leftover(path: Path, run_id: str) -> bool:
    """Whether only saves and deletions of this run use such a name."""
    run = re.escape(run_id)
    saved, deleted = rf"{re.escape(TEMPORARY)}\d+-{run}", rf"{re.escape(DELETING)}{run}-.+"
    latest = rf"\.{re.escape(LATEST)}\.[0-9a-f]{{32}}"
    return re.fullmatch(f"{saved}|{deleted}|{latest}", path.name) is not None


def remove(checkpoint: Path, run_id: str) -> None:
    """Delete a checkpoint of a run: a single rename makes it invalid before its first file is
    deleted. Raises ResourceError."""
    with explain_disk_errors(checkpoint):
        doomed = checkpoint.rename(_doomed(checkpoint, run_id))
        sync_folder(checkpoint.parent)
        failpoint("checkpoint.doomed")
    discard(doomed)


def _doomed(checkpoint: Path, run_id: str) -> Path:
    return checkpoint.with_name(f"{DELETING}{run_id}-{checkpoint.name}-{uuid.uuid4().hex[:8]}")


def _sealed(folder: Path, file: Path) -> FileDigest:
    with os.fdopen(open_to_read(file), "rb") as opened:
        os.fsync(opened.fileno())
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        sealed = FileDigest(
            file.relative_to(folder).as_posix(), os.fstat(opened.fileno()).st_size, digest
        )
    failpoint("checkpoint.sealed")
    return sealed


def _wait_for_files(temporary: Path, manifest: Manifest) -> None:
    """Wait until the folder holds what the ranks have sealed;
    a network file system may show it late."""
    end = time.monotonic() + LATE
    while odd := _disagreement(temporary, manifest):
        if time.monotonic() > end:
            raise ResourceError(
                f"the ranks and the disk disagree about {odd}", where=str(temporary), code="F27"
            )
        time.sleep(0.1)
        sync_folder(temporary)


def _disagreement(temporary: Path, manifest: Manifest) -> str | None:
    """A file that is missing, that nobody sealed, or whose size is another one;
    None if all is as it should be."""
    sizes = {name: path.lstat().st_size for name, path in files_under(temporary).items()}
    sealed = {name: file.bytes for name, file in manifest.files.items()}
    return min((name for name, _ in sizes.items() ^ sealed.items()), default=None)


def _appear(temporary: Path, final: Path, run_id: str) -> None:
    """Give a folder its final name, replacing one that may have it already."""
    checkpoints = final.parent
    if os.path.lexists(final) and not belongs(final, run_id):
        final.rename(
            final.with_name(f"{final.name}{IN_THE_WAY}{run_id[:8]}-{uuid.uuid4().hex[:8]}")
        )
    if not os.path.lexists(final):
        temporary.rename(final)
        sync_folder(checkpoints)
        return
    if exchange(temporary, final):
        sync_folder(checkpoints)
        discard(temporary)
        return
    aside = final.rename(final.with_name(SUPERSEDED + final.name))
    failpoint("checkpoint.aside")
    temporary.rename(final)
    sync_folder(checkpoints)
    discard(aside.rename(_doomed(aside, run_id)))
