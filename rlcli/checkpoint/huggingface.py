"""Models and tokenizers from Hugging Face folders, or from nothing. Only safetensors, and no code from a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.errors import ModelError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

FORBIDDEN_KEYS = ("auto_map", "custom_code", "_attn_implementation", "_attn_implementation_internal")
"""Entries of a config.json that would make transformers fetch or run somebody's code."""

OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.gguf", "*.msgpack")


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id; pad falls back to the end-of-sequence token. Raises ModelError."""
    from transformers import AutoTokenizer

    _check_folder(source, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer can be read from {source}: {_first_line(error)}") from error
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

    _check_folder(source, weights=True)
    try:
        config = _without_dropout(AutoConfig.from_pretrained(source, trust_remote_code=False))
        options: dict[str, Any] = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
        if head == "lm":
            return AutoModelForCausalLM.from_pretrained(source, config=config, **options)
        config.num_labels = 1
        model, report = AutoModelForTokenClassification.from_pretrained(
            source, config=config, output_loading_info=True, **options
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"the model in {source} cannot be loaded: {_first_line(error)}") from error
    if any(name.startswith("score") for name in report["missing_keys"]):
        _zero_head(model)
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
        made.num_labels = 1
        model = AutoModelForTokenClassification.from_config(made)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"no {model_type} model can be made from these settings: {_first_line(error)}") from error
    _zero_head(model)
    return model


def _zero_head(model: nn.Module) -> None:
    """A new value head predicts 0 everywhere, so it neither helps nor harms before it has learnt."""
    for parameter in model.score.parameters():  # type: ignore[union-attr]
        parameter.data.zero_()


def _without_dropout(config: Any) -> Any:
    """Policy ratios compare log-probs of two passes; dropout would make them differ for no reason."""
    for name in list(config.to_dict()):
        if name.endswith(("dropout", "pdrop")) and isinstance(getattr(config, name, None), int | float):
            setattr(config, name, 0.0)
    config.classifier_dropout = 0.0
    return config


def _check_folder(source: str, *, weights: bool) -> None:
    """A local folder must be whole and harmless before transformers sees it; a Hub id is left to transformers."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if folder.exists() or source.startswith((".", "/", "~")):
            raise ModelError(f"{source} is not a folder with a model", hint="give the folder that holds config.json")
        return
    config = folder / "config.json"
    if config.is_file():
        _refuse_code(config)
    elif weights:
        raise ModelError(f"{folder} has no config.json", hint="a model folder is what save_pretrained writes")
    if weights and not any(folder.glob("*.safetensors")):
        others = sorted(path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern))
        found = f"; it holds {others[0]}, which can run code when it is read" if others else ""
        raise ModelError(
            f"{folder} has no safetensors weights{found}",
            hint="load it once with transformers and save_pretrained it again",
        )


def _refuse_code(config: Path) -> None:
    try:
        entries = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{config} is not readable JSON: {_first_line(error)}") from error
    for key in FORBIDDEN_KEYS:
        if isinstance(entries, dict) and entries.get(key):
            raise ModelError(
                f"{config} has {key}, which makes transformers run code that comes with the model",
                hint=f"remove {key} if the model's architecture is one that transformers has",
                code="S6",
            )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
