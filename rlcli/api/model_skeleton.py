"""Transformers models without their weights: parameters on the meta device, buffers initialised."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlcli.api.token_texts import id_count
from rlcli.api.value_model import value_model_class
from rlcli.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def skeleton(config: Any, head: str, dtype: torch.dtype) -> nn.Module:
    """The model of a configuration in evaluation mode, its parameters on the meta device, its
    buffers on the CPU."""
    lm = on_meta(config, head, dtype)
    for parameter in lm.parameters():
        parameter._is_hf_initialized = True
    for module in lm.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    lm.initialize_weights()  # what is not marked as done: the buffers
    lm._weight_conversions = _conversions(lm)
    return lm.eval()


def on_meta(config: Any, head: str, dtype: torch.dtype) -> Any:
    """The model of a configuration, all of it on the meta device. The configuration is copied."""
    from transformers import AutoModelForCausalLM

    own_config = copy.deepcopy(config)
    with torch.device("meta"):
        if head == "lm":
            return AutoModelForCausalLM.from_config(own_config, dtype=dtype)
        own_config.num_labels = 1
        family: Any = value_model_class(own_config)
        return family._from_config(own_config, dtype=dtype)


def _conversions(lm: Any) -> list[Any]:
    """The rules by which transformers names saved weights of a model that was not read from files:
    without a prefix that files may have or lack."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    return [
        rule
        for rule in get_model_conversion_mapping(lm, add_legacy=False)
        if not isinstance(rule, PrefixChange)
    ]


def without_dropout(config: Any) -> Any:
    """Turn dropout off, also that of whole layers: policy ratios compare log-probs of two passes,
    which it would make differ for no reason."""
    for name in list(config.to_dict()):
        if name.endswith(("dropout", "pdrop", "dropout_prob", "layerdrop")) and isinstance(
            getattr(config, name, None), int | float
        ):
            setattr(config, name, 0.0)
    config.classifier_dropout = 0.0
    return config


def check_vocabulary(lm: Any, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Check that the embedding has a row for every id that the tokenizer can produce.
    Raises ModelError F32."""
    rows = lm.get_input_embeddings().weight.shape[0]
    if tokenizer is not None and (ids := id_count(tokenizer)) > rows:
        raise ModelError(
            f"the tokenizer has {ids} tokens, but the embedding has {rows} rows",
            hint="use the tokenizer that the model was made with",
            code="F32",
        )


def undescribed(lm: nn.Module, names: Iterable[str]) -> list[str]:
    """Of tensors that a model does not use, those of modules that it has, such as a bias: its
    config.json does not describe what was trained. Other parts, such as a vision tower, may be left
    out."""
    prefix, modules = str(lm.base_model_prefix), dict(lm.named_modules())

    def module_of(path: str) -> nn.Module | None:
        spellings = (path, path.removeprefix(f"{prefix}."), f"{prefix}.{path}")
        return next((modules[each] for each in spellings if each in modules), None)

    def is_lacking(name: str) -> bool:
        path, _, tensor = name.rpartition(".")
        module = module_of(path)
        return module is not None and getattr(module, tensor, None) is None

    return [name for name in names if is_lacking(name)]
