"""MANIFEST.json: which files a checkpoint has, and what tells whether they are whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rlcli.errors import ModelError

MANIFEST = "MANIFEST.json"
FORMAT = 1
LARGEST = 64 * 2**20
"""Bytes of a manifest that are read at most."""


@dataclass(frozen=True)
class FileDigest:
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint, with `/`."""
    bytes: int
    sha256: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    run_id: str
    rlcli: str
    """Version that wrote it."""
    world_size: int
    recipe_digest: str
    files: Mapping[str, FileDigest]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the step, by which the best checkpoints are told."""
    format: int = FORMAT

    def as_json(self) -> dict[str, Any]:
        """In the order in which people read it."""
        files = {path: {"bytes": one.bytes, "sha256": one.sha256} for path, one in sorted(self.files.items())}
        return {**{key: value for key, value in vars(self).items() if key != "files"}, "files": files}


def read_manifest(checkpoint: Path) -> Manifest:
    """Of a checkpoint's folder. Raises ModelError: F19 it is no manifest, F85 a newer rlcli wrote it."""
    file = checkpoint / MANIFEST
    try:
        if file.is_symlink() or file.stat().st_size > LARGEST:
            raise ValueError("it is a link, or far too large")
        fields = json.loads(file.read_bytes(), parse_constant=_refuse)
        newer = isinstance(fields, dict) and isinstance(fields.get("format"), int) and fields["format"] > FORMAT
        if newer:
            what = f"its manifest has format {fields['format']}, this rlcli reads {FORMAT}"
            raise ModelError(
                what, where=str(checkpoint), hint="use the rlcli that wrote it, or a newer one", code="F85"
            )
        return _manifest(fields)
    except FileNotFoundError:
        raise ModelError("it has no manifest: its save never ended", where=str(checkpoint), code="F19") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"its manifest cannot be read: {_reason(error)}", where=str(checkpoint), code="F19") from None


def _manifest(fields: dict[str, Any]) -> Manifest:
    files = {
        _inside(path): FileDigest(path, _natural(entry["bytes"]), _text(entry["sha256"]))
        for path, entry in fields["files"].items()
    }
    metrics = {str(name): float(value) for name, value in fields["metrics"].items()}
    return Manifest(
        step=_natural(fields["step"]),
        run_id=_text(fields["run_id"]),
        rlcli=_text(fields["rlcli"]),
        world_size=_natural(fields["world_size"]),
        recipe_digest=_text(fields["recipe_digest"]),
        files=files,
        metrics=metrics,
        format=_natural(fields["format"]),
    )


def _inside(path: str) -> str:
    """A path that stays inside the checkpoint."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise ValueError(f"{path[:80]!r} leads out of the checkpoint")
    return path


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no number of steps, bytes or ranks")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is not text")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return str(error)[:200] or type(error).__name__
