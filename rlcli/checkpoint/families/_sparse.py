"""What the Qwen models with a mixture of experts in some or all blocks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from rlcli.api.family import Experts, Form, ModelConfig
from rlcli.api.parameters import Link

from ._decoder import MLP, Decoder, expert_links, size_in


class SparseDecoder(Decoder):
    """Every `decoder_sparse_step`-th block has experts, except those in `mlp_only_layers`."""

    counted_by: ClassVar[str] = "num_experts"
    """The key that transformers writes for the number of experts."""

    def experts(self, settings: Mapping[str, Any]) -> Experts:
        return Experts(
            count=size_in(settings, "num_local_experts", size_in(settings, "num_experts")),
            per_token=size_in(settings, "num_experts_per_tok"),
            width=size_in(settings, "moe_intermediate_size"),
            normalized=bool(settings["norm_topk_prob"]),
            layers=_sparse_layers(settings, size_in(settings, "num_hidden_layers")),
        )

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        assert config.experts is not None
        hf = super().config_to_hf(config)
        if _sparse_layers({**self.defaults, **hf}, config.layers) != config.experts.layers:
            hf["decoder_sparse_step"] = 1
            hf["mlp_only_layers"] = [
                index for index in range(config.layers) if index not in config.experts.layers
            ]
        return hf | {
            self.counted_by: config.experts.count,
            "num_experts_per_tok": config.experts.per_token,
            "moe_intermediate_size": config.experts.width,
            "norm_topk_prob": config.experts.normalized,
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
