"""MANIFEST.json: which files a checkpoint has, and their digests,
which show whether they are whole.

Its last line is the digest of all lines above it, so that a changed bit in the manifest itself is
detected as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rlcli.checkpoint.disk import open_to_read
from rlcli.errors import ModelError

MANIFEST = "MANIFEST.json"
FORMAT = 1
NEWER_FORMAT = "F85"
"""Id of the fault that a newer rlcli wrote the manifest."""
LARGEST = 64 * 2**20
"""Maximum bytes of a manifest that are read."""
KEYS = ("format", "step", "run_id", "rlcli", "world_size", "recipe_digest", "metrics", "files")
"""Keys in the order in which people read them."""
SEAL = b',\n "sha256": "'
"""Precedes the digest of everything before it."""


@dataclass(frozen=True)
class FileDigest:
    """One file of a checkpoint."""

    path: str
    """Path relative to the checkpoint, with `/`."""
    bytes: int
    sha256: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    run_id: str
    rlcli: str
    """Version of rlcli that wrote it."""
    world_size: int
    recipe_digest: str
    files: Mapping[str, FileDigest]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the step, by which the best checkpoints are chosen."""
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    def as_json(self) -> dict[str, Any]:
        """Metrics that are not finite are left out: they cannot be ranked,
        and JSON cannot express them."""
        finite = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        files = {
            path: {"bytes": digest.bytes, "sha256": digest.sha256}
            for path, digest in sorted(self.files.items())
        }
        return {key: getattr(self, key) for key in KEYS} | {"metrics": finite, "files": files}

    def as_bytes(self) -> bytes:
        """The whole file as bytes."""
        return _closed(
            json.dumps(self.as_json(), indent=1, allow_nan=False).removesuffix("\n}").encode()
        )


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint's folder. Raises ModelError: F20 it has none, F19 it is not as
    it was written, F85 a newer rlcli wrote it."""
    try:
        content = _content(checkpoint / MANIFEST)
        fields = json.loads(content, parse_constant=_refuse)
        _refuse_newer(fields, checkpoint)
        if content != _closed(content.rpartition(SEAL)[0]):
            raise ValueError("it has changed since it was written")
        return _manifest(fields)
    except FileNotFoundError:
        raise ModelError(
            "it has no manifest: its save did not finish", where=str(checkpoint), code="F20"
        ) from None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise ModelError(
            f"its manifest cannot be read: {_reason(error)}", where=str(checkpoint), code="F19"
        ) from None


def _content(file: Path) -> bytes:
    with os.fdopen(open_to_read(file), "rb") as opened:
        content = opened.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError("it is far too large")
    return content


def _closed(head: bytes) -> bytes:
    return head + SEAL + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'


def _refuse_newer(fields: Any, checkpoint: Path) -> None:
    format_number = fields.get("format") if isinstance(fields, dict) else None
    if type(format_number) is int and format_number > FORMAT:
        raise ModelError(
            f"its manifest has format {format_number}, this rlcli reads {FORMAT}",
            where=str(checkpoint),
            hint="use the rlcli that wrote it, or a newer one",
            code=NEWER_FORMAT,
        )


def _manifest(fields: dict[str, Any]) -> Manifest:
    strange = sorted(set(fields) - {*KEYS, "sha256"})
    if strange or _natural(fields["format"]) != FORMAT:
        raise ValueError(
            f"unknown key {strange[0][:40]!r}"
            if strange
            else f"there is no format {fields['format']}"
        )
    files = {
        _inside(path): FileDigest(path, _natural(entry["bytes"]), _text(entry["sha256"]))
        for path, entry in fields["files"].items()
    }
    return Manifest(
        step=_natural(fields["step"]),
        run_id=_text(fields["run_id"]),
        rlcli=_text(fields["rlcli"]),
        world_size=_natural(fields["world_size"]),
        recipe_digest=_text(fields["recipe_digest"]),
        files=files,
        metrics={name: _number(value) for name, value in fields["metrics"].items()},
    )


def _inside(path: str) -> str:
    """A path that stays inside the checkpoint."""
    pure = PurePosixPath(path)
    if (
        pure.is_absolute()
        or ".." in pure.parts
        or not pure.parts
        or "\0" in path
        or pure.as_posix() != path
    ):
        raise ValueError(f"{path[:80]!r} is not a path inside the checkpoint")
    return path


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a number of steps, bytes or ranks")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is not a finite number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is not text")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return str(error)[:200] or type(error).__name__
