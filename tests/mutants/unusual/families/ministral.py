"""Ministral: Mistral whose blocks say whether they have a window."""

from collections.abc import Mapping
from typing import Any, ClassVar

from rlcli.api.family import ModelConfig, register_hf_family

from ._decoder import Decoder, size_in


@register_hf_family("ministral")
class Ministral(Decoder):
    """`layer_types` decides; without it, all blocks have the window, if there is one."""

    architecture = "MinistralForCausalLM"
    has_window = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    }  # fmt: skip

    def windows(self, settings: Mapping[str, Any]) -> tuple[int | None, ...]:
        kinds = settings.get("layer_types")
        window = settings.get("sliding_window")
        if not window or not kinds:
            return super().windows(settings)
        size = size_in(settings, "sliding_window")
        return tuple(size if kind == "sliding_attention" else None for kind in kinds)

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        windows = config.windows or (None,) * config.layers
        size = next((window for window in windows if window), None)
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        return super().config_to_hf(config) | {
            "head_dim": config.head_dim,
            "sliding_window": size,
            "layer_types": kinds,
        }
