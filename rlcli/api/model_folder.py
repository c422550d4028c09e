"""Checks of a Hugging Face model folder before transformers sees it: it must be complete and
contain no code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcli.api.headway import BYTES, Headway, doing
from rlcli.api.model_sizes import LAYERS, wrong_sizes
from rlcli.api.weight_files import (
    INCOMPLETE,
    MAX_JSON,
    SAVE_AGAIN,
    check_weights,
    inside,
    not_fetched,
)
from rlcli.errors import ModelError, first_line
from rlcli.files import is_lfs_pointer, read_regular

FORBIDDEN_KEYS = ("auto_map", "custom_code", "custom_pipelines", "trust_remote_code")
FORBIDDEN_PREFIXES = ("_attn_implementation", "attn_implementation", "_experts_implementation")
"""Entries of a model's JSON files that would make transformers fetch or run third-party code."""

WANTED_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
)
"""Files that are downloaded for a model on the Hub: no code, no pickles."""
TEMPLATES = "additional_chat_templates/*"
"""Files with the other chat templates of a model."""

TOKENIZER_FILES = ("tokenizer.*", "*.model", "vocab.*", "merges.txt")

ADAPTER = "adapter_config.json"
"""If this file exists, transformers first loads another model, which has not been checked."""

OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.gguf", "*.msgpack")


def model_folder(source: str, *, weights: bool) -> Path:
    """The checked folder of a model: a local one as it is,
    or a download from the Hub without code or pickles.

    `weights`: it must contain weights, as safetensors. Raises ModelError.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if folder.exists() or source.startswith((".", "/", "~")):
            raise ModelError(
                f"{source} is not a folder with a model",
                hint="give the folder that holds config.json",
            )
        folder = _downloaded(source, weights)
    check_folder(folder, weights=weights)
    return folder


def _downloaded(source: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [pattern for pattern in WANTED_FILES if weights or "safetensors" not in pattern]
    try:
        with doing(f"downloading {source}", unit=BYTES) as work:
            counter = download_counter(work)
            return Path(snapshot_download(source, allow_patterns=patterns, tqdm_class=counter))
    except Exception as error:
        # network, authorisation, no such model, offline: each has its own class
        raise ModelError(
            f"{source} cannot be fetched from the Hugging Face Hub: {first_line(error)}",
            hint="check the name and the network, or give a local folder",
        ) from error


def download_counter(work: Headway) -> type:
    """A progress bar of the Hub's library that prints nothing: it counts the bytes that are
    written."""
    from tqdm.auto import tqdm

    class Counter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs | {"disable": True})
            # others count the same bytes on their way through the network, and files
            is_of_disk = kwargs.get("unit") == "B" and "Downloading" not in kwargs.get("desc", "")
            self._work = work if is_of_disk else None

        def update(self, n: float | None = 1) -> None:
            if self._work is not None:
                self._work.expect(int(self.total or 0))
                self._work.advance(int(n or 0))

    return Counter


def check_folder(folder: Path, *, weights: bool) -> None:
    """Check that a model folder is complete and safe before transformers sees it. Needs no torch.
    Raises ModelError."""
    _refuse_special_files(folder)
    _refuse_links_out(folder)
    _refuse_pointers(folder)
    config = folder / "config.json"
    if weights and not config.is_file():
        raise ModelError(
            f"{folder} has no config.json", hint="a model folder is what save_pretrained writes"
        )
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            _refuse_code(folder / name)
    if not weights:
        return
    if (folder / ADAPTER).exists():
        message = f"{folder} holds an adapter, not a whole model"
        raise ModelError(
            message, hint="merge it into its base model (merge_and_unload), then save_pretrained"
        )
    if not any(folder.glob("*.safetensors")):
        raise _without_weights(folder)
    check_config(_read_json(config), str(config))
    _check_described(folder, check_weights(folder))


def _without_weights(folder: Path) -> ModelError:
    message = f"{folder} has no safetensors weights"
    others = sorted(path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern))
    if not others:
        return ModelError(message, hint=INCOMPLETE)
    remark = f"it holds {others[0]}, which can run code when it is read"
    return ModelError(f"{message}; {remark}", hint=SAVE_AGAIN)


def _refuse_pointers(folder: Path) -> None:
    for pattern in TOKENIZER_FILES:
        for file in filter(is_lfs_pointer, folder.glob(pattern)):
            raise not_fetched(file)


def check_config(config: Any, where: str) -> None:
    """Check that the sizes in a configuration are possible. Raises ModelError."""
    if not isinstance(config, dict):
        raise ModelError("it holds no configuration", where=where)
    if wrong := next(wrong_sizes(config), None):
        raise ModelError(wrong, where=where, hint="take the config.json that came with the model")


def _refuse_special_files(folder: Path) -> None:
    """Opening a pipe may block, and reading a device may never end."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelError(
                f"{path} is not an ordinary file", hint="a model folder holds files only"
            )


def _refuse_links_out(folder: Path) -> None:
    """What a model's files say is saved with every checkpoint, and published with it: none of them
    may be a link to a file of this machine. Raises ModelError S7."""
    for pattern in (*WANTED_FILES, TEMPLATES):
        for file in sorted(folder.glob(pattern)):
            inside(folder, file)


def _check_described(folder: Path, stored: Counter[str]) -> None:
    """Check that config.json does not describe more than the files hold: missing weights would be
    made up, in any amount. `stored`: tensor → its numbers in the files. Raises ModelError."""
    config = _read_json(folder / "config.json")
    inner = _of_text(config)
    layers = max((inner.get(key) or 0 for key in LAYERS), default=0)
    width = (
        inner.get("embedding_size")
        or inner.get("hidden_size")
        or inner.get("n_embd")
        or inner.get("d_model")
        or 0
    )
    rows, numbers = inner.get("vocab_size") or 0, stored.total()
    hint = "the folder is incomplete, or config.json belongs to another model"
    if layers > len(stored):
        message = f"it describes {layers} layers; the files hold {len(stored)} tensors"
        raise ModelError(message, where=str(folder / "config.json"), hint=hint)
    if rows * width > numbers and not config.get("quantization_config"):
        message = (
            f"it describes an embedding of {rows} x {width}; the files hold "
            f"{numbers} numbers in all"
        )
        raise ModelError(message, where=str(folder / "config.json"), hint=hint)


def _of_text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) and inner else config


def check_sizes(model: Path, tokenizer: Path) -> None:
    """Compare the files of a model and a tokenizer, before anything is loaded.
    Raises ModelError F32."""
    config, words = _read_json(model / "config.json"), tokenizer / "tokenizer.json"
    if not words.is_file() or not isinstance(config, dict):
        return
    rows = config.get("vocab_size") or _of_text(config).get("vocab_size")
    ids = list(token_ids(_read_json(words)))
    if isinstance(rows, int) and ids and max(ids) >= rows:
        raise ModelError(
            (
                f"the tokenizer in {tokenizer} has {max(ids) + 1} tokens, but the embedding of "
                f"{model} has {rows} rows"
            ),
            hint="use the tokenizer that the model was made with",
            code="F32",
        )


def token_ids(tokenizer: Any) -> Iterator[int]:
    """The ids in a tokenizer.json: of its vocabulary, a mapping or (Unigram) a list,
    and of the added tokens."""
    if not isinstance(tokenizer, dict):
        return
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = (entry.get("id") for entry in tokenizer.get("added_tokens") or [])
    yield from (id_ for id_ in (*ids, *added) if isinstance(id_, int))


def _refuse_code(file: Path) -> None:
    for key, value in _entries(_read_json(file)):
        fetches = isinstance(value, str) and ("/" in value or key.endswith("_internal"))
        if key in FORBIDDEN_KEYS or (key.startswith(FORBIDDEN_PREFIXES) and fetches):
            raise ModelError(
                f"{file} has {key}, which can make transformers run code that comes with the model",
                hint=f"remove {key} if the model's architecture is one that transformers has",
                code="S6",
            )


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key that has a value, with that value, at any depth."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if inner not in (None, False, "", {}, []):
            yield str(key), inner
        yield from _entries(inner)
    for inner in value if isinstance(value, list) else ():
        yield from _entries(inner)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(read_regular(file, MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not readable JSON: {first_line(error)}") from error
