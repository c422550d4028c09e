"""The law that a family reads any configuration as transformers does: configurations are drawn at
random from what transformers' own class accepts, with keys left out and in old spellings, and a
model that is described by our fields alone must compute the same."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlcli.api.family import HFFamily
from rlcli.errors import ModelError
from rlcli.testing.contract import Contract, Violation
from rlcli.testing.family_checks.examples import (
    HF_ACTIVATIONS,
    SIZES,
    Example,
    known_settings,
    random_model,
    with_models,
)
from rlcli.testing.family_checks.place import place_in

Settings = dict[str, Any]

DRAWS = 40
"""Configurations of a family; many are alike in what a fault needs."""
TOLERANCE = 1e-4

HEADS = ((4, 2), (4, 1), (4, 4), (2, 1), (6, 3))
"""Heads, and those of keys."""
VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_size": (24, 48),
    "intermediate_size": (40, 65),
    "moe_intermediate_size": (8, 33),
    "shared_expert_intermediate_size": (8, 33),
    "n_inner": (24, 65),
    "num_hidden_layers": (1, 2, 5),
    "head_dim": (8, 24),
    "hidden_act": HF_ACTIVATIONS,
    "activation_function": HF_ACTIVATIONS[1:],
    "rms_norm_eps": (1e-5, 1e-2),
    "layer_norm_epsilon": (1e-6, 1e-2),
    "rope_theta": (100.0, 5e5),
    "rope_scaling": (
        {"type": "linear", "factor": 3.0},
        {"type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "original_max_position_embeddings": (8, 32),
    "tie_word_embeddings": (True, False),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "use_sliding_window": (True, False),
    "sliding_window": (None, 1, 3),
    "max_window_layers": (0, 1, 2),
    "num_experts": (12,),
    "num_local_experts": (12,),
    "num_experts_per_tok": (1, 3),
    "norm_topk_prob": (True, False),
    "decoder_sparse_step": (1, 2, 3),
    "mlp_only_layers": ([], [0], [1]),
    "scale_attn_weights": (True, False),
    "scale_attn_by_inverse_layer_idx": (True, False),
}
"""Key of a configuration → values besides the usual one."""
DISPENSABLE = (
    "hidden_act", "activation_function", "rms_norm_eps", "layer_norm_epsilon", "rope_theta",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window",
    "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
)  # fmt: skip
"""Keys that a config.json may lack; of sizes, the defaults are too large to be tried."""


class DrawnConfigurationChecks(Contract):
    def test_any_configuration_is_read(self, family: HFFamily, examples: Sequence[Example]) -> None:
        """any configuration is read as transformers reads it"""
        example = with_models(examples)[0]
        rng = random.Random(0)
        for _ in range(DRAWS):
            settings, missing = _draw(type(example.model.config), rng)
            fault = _fault(family, example, settings, missing)
            if not fault:
                continue
            for key in list(settings):  # to name only what the fault needs
                fewer = {name: value for name, value in settings.items() if name != key}
                fault_of_fewer = _fault(family, example, fewer, missing - {key})
                if fault_of_fewer:
                    settings, fault = fewer, fault_of_fewer
            words = [f"{key}={value!r}" for key, value in settings.items()]
            lacking = [f"without {key}" for key in sorted(missing)]
            raise Violation(
                f"with {', '.join(words + lacking) or 'usual settings'}, {fault}",
                "a field of ModelConfig does not say what config.json says",
                place_in(family, "config_from_hf"),
            )


def _draw(kind: Any, rng: random.Random) -> tuple[Settings, set[str]]:
    """Unusual settings for about a third of the keys, and keys that are missing."""
    keys = {*kind().to_dict(), *kind.attribute_map, "rope_theta"}
    if "rope_parameters" in keys:
        keys |= {"rope_scaling", "original_max_position_embeddings"}
    settings = {
        key: rng.choice(values)
        for key, values in VALUES.items()
        if key in keys and rng.random() < 1 / 3
    }
    if rng.random() < 1 / 3:
        heads, key_heads = rng.choice(HEADS)
        settings |= {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    if settings.get("use_sliding_window"):  # without a window it would have no effect
        settings |= {"sliding_window": 3, "max_window_layers": rng.choice((1, 2, 4))}
    missing = {key for key in DISPENSABLE if key not in settings and rng.random() < 1 / 4}
    return settings, missing


def config_json(kind: Any, example: Example, settings: Settings, missing: set[str]) -> Settings:
    """As an older version wrote it: the base of positions is a key of its own, and so is what
    scales them."""
    hf = kind(**known_settings(kind, {**SIZES, **settings})).to_dict() | settings
    sizes = {*SIZES, *(kind.attribute_map.get(key, key) for key in SIZES)}
    described = {key: value for key, value in hf.items() if key in VALUES or key in sizes}
    if "rope_parameters" in hf:
        described["rope_theta"] = settings.get("rope_theta", hf["rope_parameters"]["rope_theta"])
    described = {key: value for key, value in described.items() if key not in missing}
    return described | {key: example.hf[key] for key in ("architectures", "model_type")}


def _fault(family: HFFamily, example: Example, settings: Settings, missing: set[str]) -> str:
    """How a model of our fields differs from that of config.json; empty if it does not, or if
    transformers or the family refuse such a model."""
    cls, kind = type(example.model), type(example.model.config)
    try:
        hf = config_json(kind, example, settings, missing)
        expected = _model(cls, kind, hf)
        logits = _logits(expected)
    except Exception:  # what checks its input, or cannot compute with it, may raise anything
        return ""
    try:
        config = family.config_from_hf(hf)
    except ModelError:
        return ""
    ids = {key: value for key, value in config.others.items() if key.endswith("_token_id")}
    ours = family.config_to_hf(dataclasses.replace(config, others=ids))
    try:
        model = _model(cls, kind, ours)
        model.load_state_dict(expected.state_dict())
        gap = float((logits - _logits(model)).abs().max())
    except Exception as error:
        return f"our fields describe no such model: {str(error).splitlines()[-1]:.90}"
    return "" if gap <= TOLERANCE else f"logits differ by {gap:.2g}"


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(3, 97, (1, 24), generator=torch.Generator().manual_seed(1))
    return model(input_ids=tokens).logits


def _model(cls: Any, kind: Any, hf: Mapping[str, Any]) -> Any:
    """A random model of a config.json."""
    copied = copy.deepcopy({**hf, "model_type": kind.model_type})  # transformers adds to it
    config = kind.from_dict(copied)
    config._attn_implementation = "eager"  # fused kernels refuse odd sizes
    return random_model(cls, config)
