"""Models and tokenizers from Hugging Face folders, or from nothing. Only safetensors, and no code from a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlcli.errors import ModelError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from rlcli.checkpoint.light_tokenizer import LightTokenizer

Tokenizer = TypeVar("Tokenizer", "PreTrainedTokenizerBase", "LightTokenizer")

FORBIDDEN_KEYS = ("auto_map", "custom_code", "custom_pipelines", "trust_remote_code")
FORBIDDEN_PREFIXES = ("_attn_implementation", "attn_implementation", "_experts_implementation")
"""Entries of a model's JSON files that would make transformers fetch or run somebody's code."""

WANTED_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model")
"""What is downloaded of a model on the Hub: no code, no pickles."""

OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.gguf", "*.msgpack")


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id; pad falls back to the end-of-sequence token. Raises ModelError."""
    from transformers import AutoTokenizer

    folder = _folder(source, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ModelError(f"no tokenizer can be read from {source}: {_first_line(error)}") from error
    return with_end_token(tokenizer, source)


def with_end_token(tokenizer: Tokenizer, source: str) -> Tokenizer:
    """The tokenizer, with a pad token if it had none. Raises ModelError if it has no end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {source} has no end-of-sequence token", hint="set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    source: str | Mapping[str, Any], *, head: str, tokenizer: PreTrainedTokenizerBase | None, seed: int
) -> nn.Module:
    """A transformers model in float32, in evaluation mode, without dropout.

    `source` is a folder, a Hub id, or a transformers configuration with its `model_type` (random weights, drawn
    from `seed`). With `head="value"` the model predicts one number per token; a head that the source does not
    have starts at zero. Raises ModelError.
    """
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()  # its reports and progress bars are not for our users
    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        model = _random(source, head, tokenizer) if isinstance(source, Mapping) else _pretrained(source, head)
    if tokenizer is not None:
        check_vocabulary(model, tokenizer)
    return model.eval()


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every id that the tokenizer can give needs a row in the embedding. Raises ModelError F32."""
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows",
            hint="use the tokenizer that the model was made with",
            code="F32",
        )


def _pretrained(source: str, head: str) -> nn.Module:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    folder = _folder(source, weights=True)
    options: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    try:
        config = _without_dropout(AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True))
        options |= {"config": config, "output_loading_info": True, "local_files_only": True}
        family = AutoModelForCausalLM if head == "lm" else AutoModelForTokenClassification
        if head == "value":
            config.num_labels = 1
        model, report = family.from_pretrained(folder, **options)
    except Exception as error:  # transformers, safetensors and torch each have their own
        raise ModelError(f"the model in {source} cannot be loaded: {_first_line(error)}") from error
    missing = set(report["missing_keys"])
    if head == "value" and any(name.startswith("score") for name in missing):
        _zero_head(model)
        missing = {name for name in missing if not name.startswith("score")}
    if missing:
        raise ModelError(
            f"the weights in {source} lack {len(missing)} tensors that the model needs, first {min(missing)}",
            hint="the folder may be incomplete, or its config.json of another model",
        )
    return model


def _random(config: Mapping[str, Any], head: str, tokenizer: PreTrainedTokenizerBase | None) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    fields = dict(config)
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ModelError("a model from scratch needs its model_type", hint="for example model_type: llama")
    if tokenizer is not None:
        fields = {
            "vocab_size": len(tokenizer), "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, **fields,
        }  # fmt: skip
    try:
        made = _without_dropout(AutoConfig.for_model(model_type, **fields))
        if head == "lm":
            return AutoModelForCausalLM.from_config(made)
        lm = AutoModelForCausalLM.from_config(made)
        made.num_labels = 1
        model = AutoModelForTokenClassification.from_config(made)
    except Exception as error:  # whatever a configuration class makes of odd values
        raise ModelError(f"no {model_type} model can be made from these settings: {_first_line(error)}") from error
    model.base_model.load_state_dict(lm.base_model.state_dict())  # a critic starts from the actor's backbone
    _zero_head(model)
    return model


def _zero_head(model: nn.Module) -> None:
    """A new value head predicts 0 everywhere, so it neither helps nor harms before it has learnt."""
    if not hasattr(model, "score"):
        raise ModelError(f"{type(model).__name__} has no value head that rlcli knows how to use")
    for parameter in model.score.parameters():  # type: ignore[union-attr]
        parameter.data.zero_()


def _without_dropout(config: Any) -> Any:
    """Policy ratios compare log-probs of two passes; dropout would make them differ for no reason."""
    for name in list(config.to_dict()):
        if name.endswith(("dropout", "pdrop")) and isinstance(getattr(config, name, None), int | float):
            setattr(config, name, 0.0)
    config.classifier_dropout = 0.0
    return config


def _folder(source: str, *, weights: bool) -> str:
    """The checked folder of a model: a local one as it is, one from the Hub downloaded, without code or pickles."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if folder.exists() or source.startswith((".", "/", "~")):
            raise ModelError(f"{source} is not a folder with a model", hint="give the folder that holds config.json")
        folder = _downloaded(source, weights)
    check_folder(folder, weights=weights)
    return str(folder)


def _downloaded(source: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [pattern for pattern in WANTED_FILES if weights or "safetensors" not in pattern]
    try:
        return Path(snapshot_download(source, allow_patterns=wanted))
    except Exception as error:  # network, authorisation, no such model, offline: each has a class of its own
        raise ModelError(
            f"{source} cannot be fetched from the Hugging Face Hub: {_first_line(error)}",
            hint="check the name and the network, or give a local folder",
        ) from error


def check_folder(folder: Path, *, weights: bool) -> None:
    """A model folder must be whole and harmless before transformers sees it. Needs no torch. Raises ModelError."""
    config = folder / "config.json"
    if weights and not config.is_file():
        raise ModelError(f"{folder} has no config.json", hint="a model folder is what save_pretrained writes")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            _refuse_code(folder / name)
    if weights and not any(folder.glob("*.safetensors")):
        others = sorted(path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern))
        found = f"; it holds {others[0]}, which can run code when it is read" if others else ""
        raise ModelError(
            f"{folder} has no safetensors weights{found}",
            hint="load it once with transformers and save_pretrained it again",
        )


def check_sizes(model: Path, tokenizer: Path) -> None:
    """Compare the files of a model and a tokenizer, before anything is loaded. Raises ModelError F32."""
    config, words = _read_json(model / "config.json"), tokenizer / "tokenizer.json"
    if not words.is_file() or not isinstance(config, dict):
        return
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    ids = list(_token_ids(_read_json(words)))
    if isinstance(rows, int) and ids and max(ids) >= rows:
        raise ModelError(
            f"the tokenizer in {tokenizer} has {max(ids) + 1} tokens, the embedding of {model} {rows} rows",
            hint="use the tokenizer that the model was made with",
            code="F32",
        )


def _token_ids(tokenizer: Any) -> Iterator[int]:
    """Of a tokenizer.json: its vocabulary, a mapping or (Unigram) a list, and the tokens added to it."""
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
    """Every key with its value, if it has one, at any depth."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if inner not in (None, False, "", {}, []):
            yield str(key), inner
        yield from _entries(inner)
    for inner in value if isinstance(value, list) else ():
        yield from _entries(inner)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not readable JSON: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
