"""Parameters counted from config.json alone, against real models of transformers."""

from __future__ import annotations

import json

import pytest
import torch

from rlcli.api.value_model import value_model_class
from rlcli.topology.architecture import KNOWN_TYPES, UnknownArchitecture, read_architecture

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 97,
    "pad_token_id": 0,
}
DENSE = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 56}
SETTINGS = [
    ("llama", DENSE),
    ("llama", {**DENSE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {**SMALL, "intermediate_size": 56}),
    ("llama", {**DENSE, "head_dim": 12}),
    ("mistral", DENSE),
    ("mistral", {**DENSE, "head_dim": 16}),
    ("mixtral", {**DENSE, "num_local_experts": 3}),
    ("mixtral",
     {**DENSE, "num_local_experts": 5, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    ("qwen2", DENSE),
    ("qwen2", {**DENSE, "tie_word_embeddings": True}),
    ("qwen3", DENSE),
    ("qwen3", {**DENSE, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3_moe", {**DENSE, "num_experts": 4, "moe_intermediate_size": 24}),
    ("qwen3_moe",
     {**DENSE, "num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 2,
      "head_dim": 16}),
    ("qwen3_moe",
     {**DENSE, "num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [0, 2]}),
    ("qwen2_moe", {**DENSE, "num_experts": 4, "moe_intermediate_size": 24,
                   "shared_expert_intermediate_size": 40}),
    ("qwen2_moe", {**DENSE, "num_experts": 4, "moe_intermediate_size": 24, "qkv_bias": False,
                   "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}),
    ("gemma", DENSE),
    ("gemma", {**DENSE, "head_dim": 16, "tie_word_embeddings": False}),
    ("gemma2", DENSE),
    ("gemma3_text", DENSE),
    ("gpt2", {**SMALL, "n_positions": 64}),
    ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 3, "vocab_size": 97, "n_inner": 100}),
    ("smollm3", DENSE),
]  # fmt: skip


def real_parameters(config, head: str) -> int:
    from transformers import AutoModelForCausalLM

    config.num_labels = 1
    make = AutoModelForCausalLM.from_config if head == "lm" else value_model_class(config)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make(config).parameters())


def make_config(model_type: str, settings: dict):
    from transformers import AutoConfig

    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(model_type, **settings, **ids)


@pytest.mark.parametrize(
    ("model_type", "settings"), SETTINGS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_parameter_is_counted(model_type, settings, tmp_path):
    config = make_config(model_type, settings)
    expected = real_parameters(config, "lm")
    assert read_architecture({"model_type": model_type, **settings}).parameters() == expected
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert read_architecture(saved).parameters() == expected


@pytest.mark.parametrize("model_type", sorted({name for name, _ in SETTINGS}))
def test_missing_settings_have_the_defaults_of_transformers(model_type):
    with_few_layers = {"num_hidden_layers": 1} | (
        {"num_experts": 2} if model_type.endswith("_moe") else {}
    )
    expected = real_parameters(make_config(model_type, with_few_layers), "lm")
    assert read_architecture({"model_type": model_type, **with_few_layers}).parameters() == expected


@pytest.mark.parametrize("model_type", sorted({name for name, _ in SETTINGS}))
def test_a_critic_is_counted_with_a_value_head(model_type):
    settings = {**DENSE, "num_local_experts": 3} if model_type == "mixtral" else DENSE
    expected = real_parameters(make_config(model_type, settings), "value")
    assert read_architecture({"model_type": model_type, **settings}).parameters("value") == expected


@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "mixtral", "olmoe"])
def test_experts_of_a_critic_are_computed_as_those_of_the_language_model(model_type):
    """Transformers has a critic of Mixtral only."""
    config = make_config(model_type, {**DENSE, "pad_token_id": 0, "num_labels": 1})
    with torch.device("meta"):
        critic = value_model_class(config)(config)
    assert critic.config._experts_implementation == "grouped_mm"


def test_every_known_type_is_tested():
    assert set(KNOWN_TYPES) == {name for name, _ in SETTINGS}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "mamba"},
        {"model_type": "llama", "hidden_size": "wide"},
        {"model_type": "llama", "vocab_size": 0},
        {"model_type": "gpt2", "add_cross_attention": True},
    ],
)
def test_configs_that_cannot_be_counted_are_refused(config):
    with pytest.raises(UnknownArchitecture):
        read_architecture(config)
