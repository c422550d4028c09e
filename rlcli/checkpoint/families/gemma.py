"""Gemma 1: norms scale by 1 + weight, tied embeddings by the root of their size."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from rlcli.api.family import register_hf_family

from ._decoder import Decoder


@register_hf_family("gemma")
class Gemma(Decoder):
    """Norm weights stay as they are stored; `norm_offset` says what is added."""

    architecture = "GemmaForCausalLM"
    norm_offset = 1.0
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False,
    }  # fmt: skip

    def activation(self, settings: Mapping[str, Any]) -> str:
        """The first releases said gelu and meant its approximation."""
        name = super().activation(settings)
        return "gelu_tanh" if name == "gelu" else name

    def embedding_scale(self, settings: Mapping[str, Any]) -> float:
        return math.sqrt(settings["hidden_size"])
