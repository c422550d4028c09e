"""The weight files of a model folder, and their headers. Loads no weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.api.model_sizes import shown
from rlcli.errors import ModelError
from rlcli.files import LFS_FETCH, is_lfs_pointer, read_regular

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
PARTS = "shard-*.safetensors"

FORMAT = {"format": "pt"}
"""Metadata of files that are written from torch."""

BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Type in a safetensors header → bytes of one number."""

MAX_JSON = 64 << 20
"""Largest JSON file of a model, in bytes. The largest known ones, tokenizers and indices,
have half of that."""

SAVE_AGAIN = "load it with transformers and save it again with save_pretrained"

INCOMPLETE = "the folder is incomplete: fetch or write it again"

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes of files that can run code when they are read."""


@dataclass(frozen=True)
class Head:
    """The header of a safetensors file. The rest of the file is exactly the bytes of its
    tensors."""

    file: Path
    tensors: Mapping[str, Any]
    """Name → `dtype`, `shape` and `data_offsets`."""
    metadata: Mapping[str, str]
    start: int
    """Where the bytes of the tensors begin."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, without any others in the folder.
    Raises ModelError."""
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(weight_map(inside(folder, index)).values()))
        _refuse_odd(index, names)
        if (folder / WHOLE).exists() and names != [WHOLE]:
            raise ModelError(f"{folder} holds {WHOLE} and {INDEX}: two models, or one in two forms")
    else:
        single = [WHOLE] if (folder / WHOLE).exists() else []
        parts = sorted(path.name for path in folder.glob(PARTS))
        if single and parts:
            raise ModelError(
                f"{folder} holds {WHOLE} and {parts[0]}: two models, or one in two forms"
            )
        names = single or parts or sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder / missing[0]} is missing",
            hint=INCOMPLETE,
        )
    return [inside(folder, folder / name) for name in names]


def _refuse_odd(index: Path, names: Sequence[str]) -> None:
    """An index may only name safetensors files in its own folder. Raises ModelError S5 or S7."""
    for name in names:
        if name.endswith(PICKLES):
            message = f"it names {shown(name)}, a pickle, which can run code when it is read"
            raise ModelError(message, where=str(index), hint=SAVE_AGAIN, code="S5")
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"it names {shown(name)}, which is not a file of this folder",
                where=str(index),
                code="S7",
            )


def inside(folder: Path, file: Path) -> Path:
    """The file, which must be in the folder after resolving links. A Hub cache's links to its own
    blobs are allowed.

    Raises ModelError S7.
    """
    home, target = folder.resolve(), file.resolve()
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    if not any(allowed in target.parents for allowed in homes):
        raise ModelError(
            f"{file} is a link out of its folder", hint="copy the file into the folder", code="S7"
        )
    return file


def read_head(file: Path) -> Head:
    """Read the header of a safetensors file. Raises ModelError if the file is damaged or truncated:
    the safetensors library checks that the offsets in its header tile the file exactly."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="np") as opened:
            metadata = opened.metadata() or {}
        with file.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            entries = json.loads(raw.read(length))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise damaged(file, error) from error
    return Head(
        file,
        {name: entry for name, entry in entries.items() if name != "__metadata__"},
        metadata,
        8 + length,
    )


def header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] = FORMAT
) -> bytes:
    """The first bytes of a file that holds these tensors, each a (name, type, shape), one after the
    other, as the safetensors library writes them."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, dtype, shape in tensors:
        end = start + math.prod(shape) * BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def damaged(file: Path, why: object) -> ModelError:
    if is_lfs_pointer(file):
        return not_fetched(file)
    hint = "the file is damaged or incomplete: fetch or write it again"
    return ModelError(f"not a valid safetensors file: {why}", where=str(file), hint=hint)


def not_fetched(file: Path) -> ModelError:
    return ModelError("a pointer of Git LFS, not the file itself", where=str(file), hint=LFS_FETCH)


def check_weights(folder: Path) -> Counter[str]:
    """Check that every file of the model exists, is complete, and holds what the index says.
    Returns name → how many numbers of that tensor the files hold, in as many pieces as there may
    be. Raises ModelError."""
    heads = {file.name: read_head(file) for file in weight_files(folder)}
    index = folder / INDEX
    for name, file in weight_map(index).items() if index.is_file() else ():
        if name not in heads[file].tensors:
            message = f"it says that {name} is in {file}, which does not hold it"
            raise ModelError(
                message, where=str(index), hint="the folder is incomplete: fetch or write it again"
            )
    stored = Counter[str]()
    for head in heads.values():
        stored.update({name: math.prod(entry["shape"]) for name, entry in head.tensors.items()})
    return stored


def weight_map(index: Path) -> dict[str, str]:
    """Tensor → file, according to an index. Raises ModelError."""
    try:
        weights = json.loads(read_regular(index, MAX_JSON))["weight_map"]
        return {str(name): str(file) for name, file in dict(weights).items()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"not the index of a model: {error}", where=str(index)) from error
