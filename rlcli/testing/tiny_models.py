"""Transformers models small enough for tests, made on the fly with well-spread random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 97
END = 2

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 16}),
    "mistral": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": None}),
    "gpt2": ("GPT2Config", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
}


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    """A two-layer configuration of `family` over a vocabulary of 97 tokens; token 2 ends a sequence."""
    import transformers

    class_name, extra = _FAMILIES[family]
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
    if family != "gpt2":
        size["intermediate_size"] = 64
    ids = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    return getattr(transformers, class_name)(vocab_size=VOCABULARY, **size, **ids, **(extra | changes))


def tiny_model(family: str = "llama", *, head: str = "lm", seed: int = 0, **changes: Any) -> nn.Module:
    """A random model; `head` is "lm" or "value". Matrices are wide enough that tokens differ clearly."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    torch.manual_seed(seed)
    if head == "lm":
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    else:
        config = tiny_config(family, num_labels=1, classifier_dropout=0.0, **changes)
        model = AutoModelForTokenClassification.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


class TinyTokenizer:
    """As much of a tokenizer as an engine asks for."""

    eos_token_id = END
    pad_token_id = 0

    def __len__(self) -> int:
        return VOCABULARY
