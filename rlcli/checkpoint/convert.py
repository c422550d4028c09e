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
from typing import Any, Literal

from rlcli.api.family import Form, HFFamily, ModelConfig
from rlcli.api.weight_files import INDEX, PARTS, inside
from rlcli.checkpoint.disk import check_free_space
from rlcli.checkpoint.families import family_of
from rlcli.checkpoint.tensor_dtypes import NAMES
from rlcli.checkpoint.tensor_files import (
    OFFSETS,
    SHARDING,
    StoredTensor,
    TensorSpec,
    stored_tensors,
)
from rlcli.checkpoint.tensor_moves import (
    Move,
    in_type,
    plan_moves,
    rows_of_vocabulary,
    stays_wide,
    strangers,
    with_vocabulary,
)
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

MOST_EXPERTS = 4096
"""Maximum number of experts in a block; the largest models have a few hundred."""

Padding = Literal["drop", "keep"]
"""What happens to rows of the embedding beyond the vocabulary of config.json."""

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
    family, config, notes = _family(hf, tensors)
    if family is None:
        from rlcli.checkpoint.library_moves import plan_library_moves

        moves = plan_library_moves(source, tensors)
    else:
        moves = plan_moves(tensors, family, config, "file")
    changes: dict[str, Any] = {}
    if family is not None and config is not None:
        moves, vocabulary = _padded(moves, family, config, "file", padding)
        changes |= vocabulary
    moves, retyped = _retyped(moves, dtype, hf, family)
    files = whole_files([spec for move in moves for spec in move.outputs], largest)
    rewritten = _rewritten(hf, changes | retyped)
    if len(files) > 1:
        rewritten[INDEX] = _index(files)
    return _conversion(source, target, hf, tensors, moves, files, rewritten, notes)


def plan_from_hf(source: Path, target: Path, *, ranks: int, dtype: str | None = None) -> Conversion:
    """From a Hugging Face folder to a role's folder as `ranks` ranks of the fsdp backend would have
    written it.

    One rank writes whole tensors. Raises ModelError, ProjectError.
    """
    if ranks < 1:
        raise UsageError(f"--ranks is {ranks}; it must be at least 1")
    tensors, hf = stored_tensors(source), _config(source)
    family, config, notes = _family(hf, tensors)
    if family is None and ranks > 1:
        from rlcli.checkpoint.library_moves import refuse_other_form

        refuse_other_form(source, tensors, hf)
    moves = plan_moves(tensors, family, config, "module")
    if family is not None and config is not None:
        moves, _ = _padded(moves, family, config, "module", "drop")
    moves, retyped = _retyped(moves, dtype, hf, family)
    specs = [spec for move in moves for spec in move.outputs]
    size = sum(spec.bytes for spec in specs)
    files = rank_files(specs, ranks, _sharding) if ranks > 1 else whole_files(specs, max(1, size))
    return _conversion(source, target, hf, tensors, moves, files, _rewritten(hf, retyped), notes)


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


def _family(
    hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> tuple[HFFamily | None, ModelConfig | None, list[str]]:
    family = family_of(hf.get("model_type"))
    if family is None:
        return (
            None,
            None,
            [f"no family {hf.get('model_type')} is registered: names are those of transformers"],
        )
    try:
        config = family.config_from_hf(hf)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"config.json is not valid: {type(error).__name__}: {error}") from error
    _refuse_absurd(config, len(tensors))
    odd = strangers(tensors, family, config)
    if any("lora_" in name for name in odd):
        raise ModelError(
            f"the folder holds LoRA weights, such as {odd[0]}, which would be lost",
            hint="merge them into the model first",
        )
    shown = f"{', '.join(odd[:3])}{', …' if len(odd) > 3 else ''}"
    return (
        family,
        config,
        [f"not a parameter of {config.family}, kept as it is: {shown}"] if odd else [],
    )


def _refuse_absurd(config: ModelConfig, tensors: int) -> None:
    """A configuration is an untrusted file; its counts must not fill our memory with names."""
    if config.layers > tensors or (
        config.experts is not None and config.experts.count > MOST_EXPERTS
    ):
        experts = f" of {config.experts.count} experts" if config.experts is not None else ""
        raise ModelError(
            (
                f"config.json describes {config.layers} layers{experts}, the folder "
                f"holds {tensors} tensors"
            ),
            hint="the folder may be incomplete, or its config.json of another model",
        )


def _padded(
    moves: list[Move], family: HFFamily, config: ModelConfig, form: Form, padding: Padding
) -> tuple[list[Move], dict[str, Any]]:
    rows = rows_of_vocabulary(moves, family, config, form)
    if padding == "keep" and rows is not None and rows > config.vocabulary:
        return moves, {"vocab_size": rows}
    return with_vocabulary(moves, family, config, form), {}


def _retyped(
    moves: list[Move], dtype: str | None, hf: Mapping[str, Any], family: HFFamily | None
) -> tuple[list[Move], dict[str, Any]]:
    """The moves with floating-point tensors of type `dtype`, except those that transformers keeps
    in float32, which no family here has; and the matching entries of config.json."""
    if dtype is not None:
        stays = stays_wide(hf, dtype) if family is None else lambda name: False
        parts = {key: part for key, part in hf.items() if isinstance(part, dict)}
        typed = {key: part | {"dtype": dtype} for key, part in parts.items() if "dtype" in part}
        return [in_type(move, NAMES[dtype], stays) for move in moves], {"dtype": dtype, **typed}
    if _dtype(hf) is not None:
        return moves, {}
    largest = max((spec for move in moves for spec in move.outputs), key=lambda spec: spec.bytes)
    name = next((name for name, stored in NAMES.items() if stored == largest.dtype), None)
    return moves, {"dtype": name} if name else {}


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
