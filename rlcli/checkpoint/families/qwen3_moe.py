"""Qwen3 with a mixture of experts in some or all blocks."""

from collections.abc import Mapping
from typing import Any, ClassVar

from rlcli.api.family import ModelConfig, register_hf_family

from ._decoder import size_in
from ._sparse import SparseDecoder


@register_hf_family("qwen3_moe")
class Qwen3Moe(SparseDecoder):
    """All blocks have the same window, if any."""

    architecture = "Qwen3MoeForCausalLM"
    qk_norm = True
    counted_by = "num_local_experts"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "mlp_only_layers": (),
    }

    def windows(self, settings: Mapping[str, Any]) -> tuple[int | None, ...]:
        return (
            (size_in(settings, "sliding_window"),) * size_in(settings, "num_hidden_layers")
            if settings.get("use_sliding_window")
            else ()
        )

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        window = next(iter(config.windows), None)
        return super().config_to_hf(config) | {
            "use_sliding_window": window is not None,
            "sliding_window": window,
        }
