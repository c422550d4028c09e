"""Tiny random models of every family and variant, as transformers makes and saves them."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
GQA = {**SIZES, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
MOE = {
    **GQA,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
SHARED = {
    **GQA,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
GPT2 = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GQA),
    "llama-tied": ("llama", {**GQA, "tie_word_embeddings": True}),
    "llama-biases-llama3-rope": ("llama", {**SIZES, "attention_bias": True, "mlp_bias": True,
                                           "rope_parameters": LLAMA3}),
    "llama-linear-rope": ("llama", {**GQA, "rope_parameters": LINEAR}),
    "qwen2": ("qwen2", GQA),
    "qwen2-tied-windows": ("qwen2", {**GQA, "tie_word_embeddings": True, "use_sliding_window": True,
                                     "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**GQA, "head_dim": 16}),
    "qwen3-tied-yarn": ("qwen3",
                        {**GQA, "head_dim": 16, "tie_word_embeddings": True,
                         "rope_parameters": YARN}),
    "mistral": ("mistral", {**GQA, "sliding_window": 6}),
    "mistral-tied": ("mistral", {**GQA, "sliding_window": None, "tie_word_embeddings": True}),
    "gemma-tied": ("gemma", {**GQA, "head_dim": 16}),
    "gemma": ("gemma",
              {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}),
    "gpt2-tied": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2": ("gpt2",
             {**GPT2, "tie_word_embeddings": False, "n_inner": 48, "activation_function": "gelu"}),
    "mixtral": ("mixtral", {**GQA, "num_local_experts": 4}),
    "mixtral-tied": ("mixtral",
                     {**GQA, "num_local_experts": 3, "tie_word_embeddings": True,
                      "sliding_window": 7}),
    "qwen2_moe": ("qwen2_moe", {**SHARED, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2_moe-tied-windows": ("qwen2_moe", {**SHARED, "tie_word_embeddings": True,
                               "use_sliding_window": True, "sliding_window": 5,
                               "max_window_layers": 2, "qkv_bias": False}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe-tied": ("qwen3_moe", {**MOE, "decoder_sparse_step": 2, "tie_word_embeddings": True}),
}  # fmt: skip
"""Name → model_type and settings. Every family has a tied and an untied variant."""


def make_model(variant: str, *, head: str = "lm", seed: int = 0) -> nn.Module:
    """A random model, none of whose parameters has its initial value."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    model_type, settings = VARIANTS[variant]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **settings)
    if head == "value":
        config.num_labels, config.classifier_dropout = 1, 0.0
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForTokenClassification
    model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def save(model: nn.Module, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """As users save their models."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.to(dtype).save_pretrained(folder)
    model.to(torch.float32)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a folder's safetensors files."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def names(file: Path) -> list[str]:
    with safe_open(file, "np") as opened:
        return list(opened.keys())
