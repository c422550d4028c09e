"""Converts models from a run's folders to folders that transformers reads, and back, using the
memory of a few tensors.

A conversion is planned in full from the headers of the files, then written next to its target,
checked, and renamed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.api.weight_files import INDEX, PARTS, inside
from rlcli.checkpoint.disk import check_free_space
from rlcli.checkpoint.move_plan import MovePlan, Padding, plan_by_model_type
from rlcli.checkpoint.tensor_dtypes import NAMES
from rlcli.checkpoint.tensor_files import (
    OFFSETS,
    SHARDING,
    StoredTensor,
    TensorSpec,
    stored_tensors,
)
from rlcli.checkpoint.tensor_moves import Move, in_type
from rlcli.checkpoint.tensor_writing import (
    FilePlan,
    Progress,
    TensorWriter,
    rank_files,
    whole_files,
)
from rlcli.disk_errors import explain_disk_errors
from rlcli.errors import ModelError, ResourceError, UsageError
from rlcli.files import read_object, sync_folder

ACCOMPANYING = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.md",
    "LICENSE*",
    "additional_chat_templates/*.jinja",
)
"""Files copied along with the weights, byte for byte."""

_DECIMAL = {f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}
_BINARY = {f"{unit}IB": 1024**power for power, unit in enumerate("KMGT", 1)}
_UNITS = {"": 1, "B": 1, **_DECIMAL, **_BINARY}


@dataclass(frozen=True)
class Conversion:
    """A planned conversion."""

    source: Path
    target: Path
    model_type: str
    moves: tuple[Move, ...]
    files: tuple[FilePlan, ...]
    accompanying: tuple[Path, ...]
    """Files to copy, relative to the source."""
    rewritten: Mapping[str, Any]
    """File → its new JSON content."""
    notes: tuple[str, ...]
    source_files: int
    source_is_sharded: bool

    @property
    def outputs(self) -> list[TensorSpec]:
        return [spec for move in self.moves for spec in move.outputs]

    @property
    def changes_names(self) -> bool:
        """Whether any tensor is written under another name, or as several."""
        stored = {tensor.spec.name for move in self.moves for tensor in move.sources}
        return stored != {spec.name for spec in self.outputs}

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that are written."""
        return sum(spec.bytes for spec in self.outputs)

    @property
    def dtypes(self) -> list[str]:
        """Types of the tensors that are written, the one with the most bytes first."""
        totals: dict[str, int] = {}
        for spec in self.outputs:
            totals[spec.dtype] = totals.get(spec.dtype, 0) + spec.bytes
        return sorted(totals, key=lambda dtype: -totals[dtype])


def plan_to_hf(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    largest: int = 5 * 10**9,
    padding: Padding = "drop",
) -> Conversion:
    """From a role's folder, whole or sharded, to one that transformers reads.

    `dtype` is float32, bfloat16, float16, or None for that of the source; a file holds at most
    `largest` bytes. Raises ModelError, ProjectError.
    """
    tensors, hf = stored_tensors(source), _config(source)
    plan = plan_by_model_type(source, tensors, hf, "file", padding)
    moves, retyped = _retyped(plan, dtype, hf)
    files = whole_files([spec for move in moves for spec in move.outputs], largest)
    rewritten = _rewritten(hf, plan.changes | retyped)
    if len(files) > 1:
        rewritten[INDEX] = _index(files)
    return _conversion(source, target, hf, tensors, moves, files, rewritten, plan.notes)


def plan_from_hf(source: Path, target: Path, *, ranks: int, dtype: str | None = None) -> Conversion:
    """From a Hugging Face folder to a role's folder as `ranks` ranks of the fsdp backend would have
    written it.

    One rank writes whole tensors. Raises ModelError, ProjectError.
    """
    if ranks < 1:
        raise UsageError(f"--ranks is {ranks}; it must be at least 1")
    tensors, hf = stored_tensors(source), _config(source)
    plan = plan_by_model_type(source, tensors, hf, "module", ranks=ranks)
    moves, retyped = _retyped(plan, dtype, hf)
    specs = [spec for move in moves for spec in move.outputs]
    size = sum(spec.bytes for spec in specs)
    files = rank_files(specs, ranks, _sharding) if ranks > 1 else whole_files(specs, max(1, size))
    rewritten = _rewritten(hf, retyped)
    return _conversion(source, target, hf, tensors, moves, files, rewritten, plan.notes)


def convert(
    conversion: Conversion, progress: Progress, check: Callable[[Path], None] | None = None
) -> None:
    """Write all files; `check` is called with the folder before it gets its final name.

    Raises ResourceError: F28 no space, F72 the target exists, F75 it cannot be written; ModelError.
    """
    refuse_existing(conversion.target)
    _refuse_full_disk(conversion)
    with _beside(conversion.target) as folder:
        with TensorWriter(folder, conversion.files, progress) as writer:
            for move in conversion.moves:
                _write(move, writer)
        _write_accompanying(conversion, folder)
        if check is not None:
            check(folder)
        _sync(folder)


def refuse_existing(target: Path) -> None:
    """Raise ResourceError F72 if anything exists at the target."""
    if os.path.lexists(target):
        raise ResourceError(
            f"{target} exists already", hint="choose another folder, or remove this one", code="F72"
        )


def parse_size(text: str) -> int:
    """`5GB` and `5GiB` as bytes. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B|)", text.strip().upper())
    size = float(match[1]) * _UNITS.get(match[2], 0) if match else 0
    if size < 1:
        raise UsageError(f"{text!r} is not a valid file size", hint="write 5GB, 500MB or 2GiB")
    return int(size)


def _write(move: Move, writer: TensorWriter) -> None:
    if move.is_copy:
        writer.copy(move.sources[0], move.outputs[0])
        return
    arrays = move.make()
    for spec in move.outputs:
        writer.write(spec, arrays.pop(spec.name), move.sources[0].spec.dtype)


def _conversion(
    source: Path,
    target: Path,
    hf: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    moves: Sequence[Move],
    files: Sequence[FilePlan],
    rewritten: Mapping[str, Any],
    notes: Sequence[str],
) -> Conversion:
    files_of_source = {piece.extent.file for tensor in tensors.values() for piece in tensor.pieces}
    return Conversion(
        source=source,
        target=target,
        model_type=str(hf.get("model_type")),
        moves=tuple(moves),
        files=tuple(files),
        accompanying=_accompanying(source, rewritten),
        rewritten=rewritten,
        notes=tuple(notes),
        source_files=len(files_of_source),
        source_is_sharded=any(file.match(PARTS) for file in files_of_source),
    )


def _config(source: Path) -> dict[str, Any]:
    file = inside(source, source / "config.json")
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"it holds no configuration: {error}", where=str(file)) from error


def _retyped(
    plan: MovePlan, dtype: str | None, hf: Mapping[str, Any]
) -> tuple[list[Move], dict[str, Any]]:
    """The moves with floating-point tensors of type `dtype`, except those that transformers keeps
    in float32, which no family here has; and the matching entries of config.json."""
    if dtype is not None:
        stays = plan.stays_wide(dtype)
        parts = {key: part for key, part in hf.items() if isinstance(part, dict)}
        typed = {key: part | {"dtype": dtype} for key, part in parts.items() if "dtype" in part}
        return [in_type(move, NAMES[dtype], stays) for move in plan.moves], {
            "dtype": dtype,
            **typed,
        }
    if _dtype(hf) is not None:
        return plan.moves, {}
    outputs = (spec for move in plan.moves for spec in move.outputs)
    largest = max(outputs, key=lambda spec: spec.bytes)
    name = next((name for name, stored in NAMES.items() if stored == largest.dtype), None)
    return plan.moves, {"dtype": name} if name else {}


def _dtype(hf: Mapping[str, Any]) -> Any:
    """The dtype in config.json, under its current key or the earlier one."""
    return hf.get("dtype", hf.get("torch_dtype"))


def _rewritten(hf: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """config.json, if anything in it changes; otherwise it is copied byte for byte."""
    before = {**hf, "dtype": _dtype(hf)}
    if all(before.get(key) == value for key, value in changes.items()):
        return {}
    return {
        "config.json": {key: value for key, value in hf.items() if key != "torch_dtype"}
        | dict(changes)
    }


def _index(files: Sequence[FilePlan]) -> dict[str, Any]:
    weights = {spec.name: plan.name for plan in files for spec in plan.tensors}
    total = sum(spec.bytes for plan in files for spec in plan.tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}


def _sharding(offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    return {
        "format": "pt",
        SHARDING: json.dumps({name: {OFFSETS: list(at)} for name, at in offsets.items()}),
    }


def _accompanying(source: Path, rewritten: Mapping[str, Any]) -> tuple[Path, ...]:
    candidates = {
        file for pattern in ACCOMPANYING for file in source.glob(pattern) if file.is_file()
    }
    unchanged = (file for file in candidates if file.name not in rewritten)
    accompanying = (file for file in unchanged if not file.name.endswith(".safetensors.index.json"))
    return tuple(inside(source, file).relative_to(source) for file in sorted(accompanying))


def _write_accompanying(conversion: Conversion, folder: Path) -> None:
    for relative in conversion.accompanying:
        (folder / relative).parent.mkdir(exist_ok=True)
        (folder / relative).write_bytes((conversion.source / relative).read_bytes())
    for name, content in conversion.rewritten.items():
        (folder / name).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def _refuse_full_disk(conversion: Conversion) -> None:
    others = sum(
        (conversion.source / relative).stat().st_size for relative in conversion.accompanying
    )
    needed = conversion.bytes + others + 2**20
    check_free_space(
        conversion.target, needed, "the model", "make room, or choose a folder on another disk"
    )


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A folder that becomes the target on success and is removed on failure."""
    target = target.absolute()
    temporary = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex}")
    try:
        with explain_disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            yield temporary
            refuse_existing(target)
            temporary.rename(target)
            sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Sync a folder and its small files to disk; the weights are already on it."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        elif path.suffix != ".safetensors":
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
