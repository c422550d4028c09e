"""Qwen1.5 and Qwen2 with a mixture of experts, one of them shared, in some or all blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rlcli.api.family import Experts, Form, ModelConfig, register_hf_family
from rlcli.api.parameters import Link

from ._decoder import MLP, linear_links, size_in
from ._sparse import SparseDecoder
from .qwen2 import WindowedDecoder


@register_hf_family("qwen2_moe")
class Qwen2Moe(SparseDecoder, WindowedDecoder):
    """The output of the shared expert is scaled by the sigmoid of a router of its own."""

    architecture = "Qwen2MoeForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "qkv_bias": True,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "mlp_only_layers": (),
    }

    def has_window_at(self, settings: Mapping[str, Any], index: int) -> bool:
        return index % 2 == 0 and index < settings["max_window_layers"]

    def qkv_bias(self, settings: Mapping[str, Any]) -> bool:
        return bool(settings["qkv_bias"])

    def output_bias(self, settings: Mapping[str, Any]) -> bool:
        return False

    def experts(self, settings: Mapping[str, Any]) -> Experts:
        shared = size_in(settings, "shared_expert_intermediate_size")
        return replace(super().experts(settings), shared=shared)

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert config.experts is not None
        return super().config_to_hf(config) | {
            "qkv_bias": config.qkv_bias,
            "shared_expert_intermediate_size": config.experts.shared,
        }

    def mlp_links(self, config: ModelConfig, index: int, form: Form) -> Iterator[Link]:
        yield from super().mlp_links(config, index, form)
        assert config.experts is not None
        if index not in config.experts.layers:
            return
        theirs, ours = f"model.layers.{index}.mlp", f"layers.{index}.mlp.shared_expert"
        yield from linear_links(f"{theirs}.shared_expert.", f"{ours}.", MLP, bias=False)
        yield Link(f"{theirs}.shared_expert_gate.weight", (f"{ours}.router.weight",))
