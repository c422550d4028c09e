"""Which checkpoints there are, and whether they are whole: told by digests, never by a name."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from rlcli.checkpoint.manifest import MANIFEST, FileDigest, Manifest, read_manifest
from rlcli.errors import ModelError

NAME = re.compile(r"step-(\d{12})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte was found to be what its manifest says."""

    path: Path
    manifest: Manifest
    strangers: tuple[str, ...] = ()
    """Files that the manifest does not know; nothing reads them."""


def checkpoints_in(folder: Path) -> list[Path]:
    """What is named like a checkpoint, newest first."""
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: path.name, reverse=True)


def verify(checkpoint: Path) -> Checkpoint:
    """Read every byte of a checkpoint. Raises ModelError with the file that is missing, short, changed or a link."""
    if checkpoint.is_symlink():
        raise ModelError("it is a link", where=str(checkpoint), code="F20")
    manifest = read_manifest(checkpoint)
    for file in manifest.files.values():
        _verify_file(checkpoint, file)
    known = {*manifest.files, MANIFEST}
    there = (path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if not path.is_dir())
    return Checkpoint(checkpoint, manifest, tuple(sorted(set(there) - known)))


def newest_verified(folder: Path) -> tuple[Checkpoint | None, list[ModelError]]:
    """The newest checkpoint that is whole, and why each newer one is not."""
    rejected: list[ModelError] = []
    for path in checkpoints_in(folder):
        try:
            return verify(path), rejected
        except ModelError as error:
            rejected.append(error)
    return None, rejected


def _verify_file(checkpoint: Path, file: FileDigest) -> None:
    path = checkpoint / file.path
    try:
        if any(parent.is_symlink() for parent in path.parents if checkpoint in parent.parents):
            raise ModelError("it lies behind a link", where=str(path), code="F20")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise ModelError("it is missing", where=str(path), code="F20") from None
    except OSError as error:
        raise ModelError(f"it cannot be read: {error.strerror}", where=str(path), code="F20") from None
    with os.fdopen(descriptor, "rb") as opened:
        size = os.fstat(descriptor).st_size
        if size != file.bytes:
            raise ModelError(f"size {size}, the manifest says {file.bytes}", where=str(path), code="F17")
        if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
            raise ModelError("its content is not what was written", where=str(path), code="F18")
