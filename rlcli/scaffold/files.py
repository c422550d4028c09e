"""Writes new files: all of them or none, without overwriting anything."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rlcli.errors import UsageError
from rlcli.files import not_writable
from rlcli.scaffold.plan import Scaffold


def refuse_existing(scaffold: Scaffold) -> None:
    """Raises UsageError if one of the files exists."""
    for file in scaffold.files:
        if file.path.exists() or file.path.is_symlink():
            raise _exists(file.path)


def write(scaffold: Scaffold) -> None:
    """Write all files. Raises UsageError for one that exists,
    ResourceError if nothing can be written."""
    refuse_existing(scaffold)
    created: list[Path] = []
    try:
        for file in scaffold.files:
            _make_folder(file.path.parent, created)
            with file.path.open("x", encoding="utf-8") as new:
                created.append(file.path)
                new.write(file.text)
    except BaseException as error:
        _take_back(created)
        if isinstance(error, FileExistsError):
            raise _exists(Path(error.filename)) from error
        if isinstance(error, OSError) and error.filename is not None:
            raise not_writable(Path(error.filename), error) from error
        raise


def _exists(path: Path) -> UsageError:
    hint = "choose another name"
    if path.name == "pyproject.toml":
        hint = (
            "choose another folder; or make this one a project: add an empty table "
            "[tool.rlcli] to the file"
        )
    return UsageError(f"{path} already exists; not overwriting it", hint=hint, code="R68")


def _make_folder(folder: Path, created: list[Path]) -> None:
    missing = [ancestor for ancestor in (folder, *folder.parents) if not ancestor.exists()]
    for ancestor in reversed(missing):
        ancestor.mkdir()
        created.append(ancestor)


def _take_back(created: list[Path]) -> None:
    """Remove the files of an incomplete scaffold."""
    for path in reversed(created):
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()
