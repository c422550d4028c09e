"""Seed-OSS: Llama with biases of q, k and v only, and a dropout after each block."""

from collections.abc import Mapping
from typing import Any, ClassVar

from rlcli.api.family import ModelConfig, register_hf_family

from ._decoder import Decoder


@register_hf_family("seed_oss")
class SeedOss(Decoder):
    """The bias of the output has a key of its own."""

    architecture = "SeedOssForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 155136, "hidden_size": 4096, "intermediate_size": 27648,
        "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8,
        "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 524288,
        "rms_norm_eps": 1e-6, "attention_bias": True, "mlp_bias": False,
    }  # fmt: skip

    def output_bias(self, settings: Mapping[str, Any]) -> bool:
        return bool(settings.get("attention_out_bias", False))

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        return super().config_to_hf(config) | {"attention_out_bias": config.output_bias}
