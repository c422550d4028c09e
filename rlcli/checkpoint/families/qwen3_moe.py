"""Qwen3 with a mixture of experts in some or all blocks."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from rlcli.api.family import Experts, Form, ModelConfig, register_hf_family
from rlcli.api.parameters import Link

from ._decoder import MLP, Decoder, expert_links, size_in


@register_hf_family("qwen3_moe")
class Qwen3Moe(Decoder):
    """Every `decoder_sparse_step`-th block has experts, except those in `mlp_only_layers`."""

    architecture = "Qwen3MoeForCausalLM"
    qk_norm = True
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

    def experts(self, settings: Mapping[str, Any]) -> Experts:
        return Experts(
            count=size_in(settings, "num_local_experts", size_in(settings, "num_experts", 128)),
            per_token=size_in(settings, "num_experts_per_tok"),
            width=size_in(settings, "moe_intermediate_size"),
            normalized=bool(settings["norm_topk_prob"]),
            layers=_sparse_layers(settings, size_in(settings, "num_hidden_layers")),
        )

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert config.experts is not None
        window = next(iter(config.windows), None)
        hf = super().config_to_hf(config)
        if _sparse_layers({**self.defaults, **hf}, config.layers) != config.experts.layers:
            hf["decoder_sparse_step"] = 1
            hf["mlp_only_layers"] = [
                index for index in range(config.layers) if index not in config.experts.layers
            ]
        return hf | {
            "num_local_experts": config.experts.count,
            "num_experts_per_tok": config.experts.per_token,
            "moe_intermediate_size": config.experts.width,
            "norm_topk_prob": config.experts.normalized,
            "use_sliding_window": window is not None,
            "sliding_window": window,
        }

    def mlp_links(self, config: ModelConfig, index: int, form: Form) -> Iterator[Link]:
        assert config.experts is not None
        if index in config.experts.layers:
            yield from expert_links(config, index, form, f"model.layers.{index}.mlp", MLP)
        else:
            yield from super().mlp_links(config, index, form)


def _sparse_layers(settings: Mapping[str, Any], count: int) -> tuple[int, ...]:
    step, dense = settings["decoder_sparse_step"], settings["mlp_only_layers"] or ()
    return tuple(index for index in range(count) if index not in dense and (index + 1) % step == 0)
