"""Mixtral: Mistral with a mixture of experts in every block."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from rlcli.api.family import Experts, Form, ModelConfig, register_hf_family
from rlcli.api.parameters import Link

from ._decoder import Decoder, expert_links, size_in


@register_hf_family("mixtral")
class Mixtral(Decoder):
    """Of w1, w2, w3 in files, w2 is the down projection."""

    architecture = "MixtralForCausalLM"
    has_window = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "default_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip

    def experts(self, settings: Mapping[str, Any]) -> Experts:
        return Experts(
            count=size_in(settings, "num_local_experts"),
            per_token=size_in(settings, "num_experts_per_tok"),
            width=size_in(settings, "intermediate_size"),
            normalized=True,
            layers=tuple(range(size_in(settings, "num_hidden_layers"))),
        )

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert config.experts is not None
        assert config.rope is not None
        experts = {
            "num_local_experts": config.experts.count,
            "num_experts_per_tok": config.experts.per_token,
        }
        # its class in transformers has no default of what these positions are computed from
        needs_size = config.rope.scaling.get("rope_type") == "yarn"
        head = {"head_dim": config.head_dim} if needs_size else {}
        return super().config_to_hf(config) | head | experts

    def mlp_links(self, config: ModelConfig, index: int, form: Form) -> Iterator[Link]:
        names = {"w1": "gate", "w3": "up", "w2": "down"}
        yield from expert_links(
            config, index, form, f"model.layers.{index}.block_sparse_moe", names
        )
