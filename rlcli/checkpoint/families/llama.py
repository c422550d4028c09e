"""Llama 1 to 3.3, and whatever else calls itself llama."""

from collections.abc import Mapping
from typing import Any, ClassVar

from rlcli.api.family import register_hf_family

from ._decoder import Decoder


@register_hf_family("llama")
class Llama(Decoder):
    """Biases where `attention_bias` and `mlp_bias` say so."""

    architecture = "LlamaForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "attention_bias": False,
        "mlp_bias": False,
    }  # fmt: skip
