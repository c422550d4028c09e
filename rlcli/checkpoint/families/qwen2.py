"""Qwen2 and Qwen2.5: biases of q, k and v only; an attention window from some block on, if any."""

from collections.abc import Mapping
from typing import Any, ClassVar

from rlcli.api.family import ModelConfig, register_hf_family

from ._decoder import Decoder, size_in

QWEN = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip


class WindowedDecoder(Decoder):
    """Blocks whose `layer_types` say so, or else those from `max_window_layers` on,
    have a window."""

    def windows(self, settings: Mapping[str, Any]) -> tuple[int | None, ...]:
        if not settings.get("use_sliding_window"):
            return ()
        window, count = size_in(settings, "sliding_window"), size_in(settings, "num_hidden_layers")
        if kinds := settings.get("layer_types"):
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        return tuple(
            window if self.has_window_at(settings, index) else None for index in range(count)
        )

    def has_window_at(self, settings: Mapping[str, Any], index: int) -> bool:
        """Whether block `index` has a window in a configuration without `layer_types`."""
        return bool(index >= settings["max_window_layers"])

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        window = next((window for window in config.windows if window), None)
        return super().config_to_hf(config) | {
            "layer_types": kinds or ["full_attention"] * config.layers,
            "use_sliding_window": window is not None,
            "sliding_window": window,
        }


@register_hf_family("qwen2")
class Qwen2(WindowedDecoder):
    """The head size is always hidden / heads."""

    architecture = "Qwen2ForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = QWEN

    def qkv_bias(self, settings: Mapping[str, Any]) -> bool:
        return True

    def output_bias(self, settings: Mapping[str, Any]) -> bool:
        return False
