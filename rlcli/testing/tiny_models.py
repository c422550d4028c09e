"""Transformers models small enough for tests, built on the fly with well-spread random weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rlcli.api.value_model import value_model_class
from rlcli.testing.on_host import on_host

VOCABULARY = 97
END = 2
FIRST_LETTER = ord(" ")

WINDOW = 4
"""Tokens visible to families with sliding windows: fewer than in a text of the contract."""

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "deep_llama": {"model_type": "llama", "num_hidden_layers": 4},
    "qwen3": {"head_dim": 16},
    "biased_qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW,
               "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
                "embedding_multiplier": 2.0},
    "olmo2": {},
    "mixtral": {"intermediate_size": 24, "num_local_experts": 4},
    "deep_mixtral": {"model_type": "mixtral", "num_hidden_layers": 4, "intermediate_size": 24,
                     "num_local_experts": 4},
    "qwen2_moe": {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 3,
                  "num_experts_per_tok": 2, "decoder_sparse_step": 2,
                  "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 24,
                  "num_experts": 3, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
    "olmoe": {"intermediate_size": 24, "num_experts": 3, "num_experts_per_tok": 2},
    "modernbert-decoder": {},
}  # fmt: skip
"""By `model_type`, or by another name with a `model_type`. Everything that scales, caps or hides
something is set so that it has an effect."""
ALL_HEADS = ("gpt2", "gpt_neox", "modernbert-decoder")
"""Families that have keys for each head of queries."""


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    """A configuration of `family` with two layers (the deep ones have four) over a vocabulary of 97
    tokens; token 2 ends a sequence."""
    from transformers import AutoConfig

    size = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    if family != "gpt2":
        size["intermediate_size"] = 64
    if family not in ALL_HEADS:
        size["num_key_value_heads"] = 2
    ids = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    settings = {**size, **ids, **_FAMILIES[family], "attn_implementation": "eager", **changes}
    model_type = settings.pop("model_type", family)
    return AutoConfig.for_model(model_type, vocab_size=VOCABULARY, **settings)


_BUILT: dict[tuple[str, str, int], tuple[nn.Module, torch.Tensor]] = {}
"""Each model of the usual size that was asked for, and the random state that building it left."""


@on_host()
def tiny_model(
    family: str = "llama", *, head: str = "lm", seed: int = 0, **changes: Any
) -> nn.Module:
    """A random model; `head` is "lm" or "value". Matrices are wide enough that tokens differ
    clearly."""
    torch.manual_seed(seed)
    if changes:
        return _built(family, head, **changes)
    arguments = family, head, seed
    if arguments not in _BUILT:  # building it takes several times as long as copying it
        _BUILT[arguments] = _built(family, head), torch.get_rng_state()
    model, state = _BUILT[arguments]
    torch.set_rng_state(state)
    return copy.deepcopy(model)


def _built(family: str, head: str, **changes: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    if head == "lm":
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    else:
        config = tiny_config(family, num_labels=1, classifier_dropout=0.0, **changes)
        model = value_model_class(config)(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


class TinyTokenizer:
    """The part of a tokenizer that an engine uses, and texts in which each token is a letter."""

    eos_token_id = END
    pad_token_id = 0
    chat_template = None

    def __len__(self) -> int:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [(ord(letter) - FIRST_LETTER) % VOCABULARY for letter in text]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(FIRST_LETTER + int(token)) for token in ids)
