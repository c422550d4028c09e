"""The config.json of each role: of a folder, of a model made from scratch, of one in the local Hub
cache, or of one that shipped recipes name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.api.architecture import Architecture
from rlcli.api.model_folder import token_ids
from rlcli.api.weight_files import MAX_JSON
from rlcli.files import read_object, read_regular
from rlcli.recipe.components import declared
from rlcli.recipe.role_sources import weights_origin
from rlcli.recipe.warm_start import warm_starts
from rlcli.topology.architecture import UnknownArchitecture, read_architecture

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved

MAX_CONFIG_SIZE = 1 << 20
"""Bytes; a larger file is not a configuration."""


KNOWN_CONFIGS = Path(__file__).with_name("known_configs.json")
"""Configurations of the Hub's models that shipped recipes name,
so that `plan` knows their sizes offline."""

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the name of its type."""


def architecture_of(resolved: Resolved, role: str) -> Architecture | str:
    """The sizes of a role's model, or why they are unknown. Reads local files only;
    nothing is downloaded."""
    try:
        return read_architecture(_config_of(resolved, role))
    except UnknownArchitecture as error:
        return str(error)


def saved_width(resolved: Resolved, role: str) -> int:
    """Bytes per number in a role's saved folder: as `checkpoint.save_dtype` says,
    or as in its source."""
    asked = resolved.recipe.checkpoint.save_dtype
    if asked != "auto":
        return WIDTHS[asked]
    role = weights_origin(resolved.recipe, role)
    section = resolved.recipe.models[role]
    if section.scratch is not None:
        return WIDTHS["float32"]
    if section.warm_start is not None:
        start = next(start for start in warm_starts(resolved) if start.role == role)
        return saved_width(start.source, start.source_role)
    try:
        config = _config_of(resolved, role)
    except UnknownArchitecture:
        return WIDTHS["float32"]
    return WIDTHS.get(str(config.get("dtype") or config.get("torch_dtype")), WIDTHS["float32"])


def _config_of(resolved: Resolved, role: str) -> Mapping[str, Any]:
    role = weights_origin(resolved.recipe, role)
    section = resolved.recipe.models[role]
    if section.scratch is not None:
        tokens = None if "vocab_size" in section.scratch else vocabulary_of(section.tokenizer)
        return section.scratch if tokens is None else {"vocab_size": tokens, **section.scratch}
    if section.warm_start is not None:
        start = next(start for start in warm_starts(resolved) if start.role == role)
        return _config_of(start.source, start.source_role)
    assert section.path is not None
    folder = Path(section.path).expanduser()
    if folder.is_dir():
        return _read(folder / "config.json")
    cached = cached_folder(section.path)
    if cached is not None:
        return _read(cached / "config.json")
    known_configs = read_object(KNOWN_CONFIGS)
    if section.path not in known_configs:
        raise UnknownArchitecture(
            f"{section.path} is not in the local Hub cache (rlcli does not download here); "
            f"`hf download {section.path} config.json` does"
        )
    config: Mapping[str, Any] = known_configs[section.path]
    return config


def cached_folder(model: str) -> Path | None:
    """The newest snapshot of a Hub model on this machine that has a config.json, or None."""
    home = Path(
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    repository = cache / f"models--{model.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
        names = [revision, *sorted(os.listdir(repository / "snapshots"))]
    except (OSError, ValueError):
        return None
    snapshots = [repository / "snapshots" / name for name in names]
    return next((folder for folder in snapshots if (folder / "config.json").is_file()), None)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        config = read_object(file, MAX_CONFIG_SIZE)
    except (OSError, ValueError) as error:
        raise UnknownArchitecture(f"{file} holds no configuration: {error}") from error
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and "model_type" in inner else config


def vocabulary_of(tokenizer: str | None) -> int:
    """One more than the largest id of a tokenizer: the vocabulary size of a model from scratch.
    Raises UnknownArchitecture."""
    if tokenizer is not None and tokenizer.startswith("builtin:"):
        size = declared("datasets", tokenizer.removeprefix("builtin:"), "VOCABULARY")
        if isinstance(size, int):
            return size
        raise UnknownArchitecture(
            f"{tokenizer} does not say how many tokens it has; set vocab_size"
        )
    folder = Path(tokenizer or "").expanduser()
    if not folder.is_dir():
        folder = cached_folder(tokenizer or "") or folder
    try:
        words = json.loads(read_regular(folder / "tokenizer.json", MAX_JSON))
        return max(token_ids(words)) + 1
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UnknownArchitecture(
            f"the tokens of {tokenizer} cannot be counted here; set vocab_size"
        ) from error
