"""Mistral: Llama with an attention window and no biases."""

from collections.abc import Mapping
from typing import Any, ClassVar

from rlcli.api.family import register_hf_family

from ._decoder import Decoder


@register_hf_family("mistral")
class Mistral(Decoder):
    """All blocks have the same window, or none."""

    architecture = "MistralForCausalLM"
    has_window = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    }  # fmt: skip
