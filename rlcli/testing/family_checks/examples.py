"""Tiny random models of a family, built and saved by transformers:
one for every switch in its configuration."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlcli.api.family import HFFamily, ModelConfig
from rlcli.checkpoint.families import family_of
from rlcli.errors import ModelError
from rlcli.testing.contract import Violation, place_of, skip_unless
from rlcli.testing.saved_models import saved_weights

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 6, "max_window_layers": 1, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""Values for those of these keys that a configuration has.
A head is larger than hidden_size / heads."""

HF_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KNOBS: dict[str, Sequence[Any]] = {
    "num_key_value_heads": (1, 4),
    "head_dim": (24, None),
    "sliding_window": (None,),
    "hidden_act": HF_ACTIVATIONS,
    "activation_function": ("gelu",),
    "n_inner": (48,),
    "mlp_only_layers": ([1],),
    "num_experts": (12,),
    "num_local_experts": (12,),
    "decoder_sparse_step": (2,),
    "rope_parameters": (
        {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
        {"rope_theta": 1e4, **YARN},
        {"rope_theta": 5e5, **LLAMA3, "original_max_position_embeddings": 16},
    ),
}
"""Further values of keys that are not on/off switches."""

WITHOUT_EFFECT = (
    "use_cache",
    "summary_",
    "output_",
    "reorder_",
    "return_dict",
    "is_encoder_decoder",
)
"""Prefixes of switches that do not affect parameters or logits."""


@dataclass(frozen=True)
class Example:
    """A model of a family."""

    about: str
    """What is special about it."""
    hf: Mapping[str, Any]
    """Its config.json."""
    tensors: Mapping[str, torch.Tensor]
    """Its weights, as on disk."""
    model: Any = None
    """The transformers model, if there is one."""


@lru_cache(maxsize=16)
def made_examples(model_type: str) -> tuple[Example, ...]:
    """Models of a family whose `architecture` transformers has; Violation for any other."""
    import transformers

    family = family_of(model_type)
    assert family is not None
    lm = getattr(transformers, family.architecture, None)
    if lm is None:
        raise Violation(
            f"transformers has no {family.architecture}, so there is no model to test it on",
            "name an architecture of transformers, or give the test a method `make_examples` with "
            "your own weights",
            place_of(type(family)),
        )
    with_values = getattr(transformers, _with_value_head(family.architecture), None)
    examples = [_made(family, model_type, lm, *variant) for variant in _variants(lm.config_class)]
    if with_values is not None:
        head = {"num_labels": 1, "classifier_dropout": 0.0}
        examples.append(_made(family, model_type, with_values, "a value head", head))
    return tuple(example for example in examples if example is not None)


def with_models(examples: Sequence[Example]) -> list[Example]:
    """Those that transformers has a model of; the check is skipped if there are none."""
    examples_with_model = [example for example in examples if example.model is not None]
    skip_unless(examples_with_model, "not tried: transformers has no such model")
    return examples_with_model


def configured(
    family: HFFamily, examples: Sequence[Example]
) -> Iterator[tuple[Example, ModelConfig]]:
    """Each example with its configuration in our form."""
    return ((example, family.config_from_hf(example.hf)) for example in examples)


def _with_value_head(architecture: str) -> str:
    for ending in ("ForCausalLM", "LMHeadModel"):
        architecture = architecture.removesuffix(ending)
    return f"{architecture}ForTokenClassification"


def _variants(kind: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is special, settings): plain, then each switch flipped and each knob at its other
    values."""
    usual = kind(**known_settings(kind, SIZES)).to_dict()
    yield "nothing special", {}
    for key, value in usual.items():
        if isinstance(value, bool) and not key.startswith(WITHOUT_EFFECT):
            yield f"{key}: {not value}", {key: not value}
        for value_to_try in KNOBS.get(key, ()):
            if value_to_try != value:
                yield f"{key}: {json.dumps(value_to_try)}", {key: value_to_try}


def known_settings(kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that such a configuration has a key for, under any name."""
    keys = {*kind().to_dict(), *kind.attribute_map}
    return {key: value for key, value in settings.items() if key in keys}


def _made(
    family: HFFamily, model_type: str, cls: Any, about: str, settings: Mapping[str, Any]
) -> Example | None:
    """None if there are no such models, or the family declares that it does not support them."""
    kind = cls.config_class
    try:
        config = kind(**{**known_settings(kind, SIZES), **settings})
        model = random_model(cls, config)
        with torch.no_grad():
            model(input_ids=torch.arange(3)[None])
    except Exception:  # what validates its input, or cannot compute with it, may raise anything
        if not settings:
            raise
        return None
    hf = json.loads(config.to_json_string(use_diff=False))
    hf |= {"architectures": [cls.__name__], "model_type": model_type}
    try:
        family.config_from_hf(hf)
    except ModelError:
        return None
    return Example(about, hf, _as_saved(model), model)


def random_model(cls: Any, config: Any) -> Any:
    """A model with weights so large that attention is peaked, and positions matter."""
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def _as_saved(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that `save_pretrained` writes, under their names there."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]
        return saved_weights(Path(folder))
