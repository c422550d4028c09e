"""Phi-3: Llama with fused matrices, and a pad id that is outside of small vocabularies."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from rlcli.api.family import Form, ModelConfig, register_hf_family
from rlcli.api.parameters import Link

from ._decoder import Decoder


@register_hf_family("phi3")
class Phi3(Decoder):
    """All of each head is rotated: `partial_rotary_factor` is 1."""

    architecture = "Phi3ForCausalLM"
    has_window = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    }  # fmt: skip

    def block_links(self, config: ModelConfig, index: int, form: Form) -> Iterator[Link]:
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        yield Link(f"{theirs}.input_layernorm.weight", (f"{ours}.attention.norm.weight",))
        matrices = tuple(f"{ours}.attention.{letter}.weight" for letter in "qkv")
        rows = _rows_of_heads(config)
        yield Link(f"{theirs}.self_attn.qkv_proj.weight", matrices, rows=rows)
        yield Link(f"{theirs}.self_attn.o_proj.weight", (f"{ours}.attention.output.weight",))
        yield Link(f"{theirs}.post_attention_layernorm.weight", (f"{ours}.mlp.norm.weight",))
        yield Link(
            f"{theirs}.mlp.gate_up_proj.weight",
            (f"{ours}.mlp.gate.weight", f"{ours}.mlp.up.weight"),
            rows=(config.mlp, config.mlp),
        )
        yield Link(f"{theirs}.mlp.down_proj.weight", (f"{ours}.mlp.down.weight",))


def _rows_of_heads(config: ModelConfig) -> tuple[int, ...]:
    heads = (config.heads, config.kv_heads, config.kv_heads)
    return tuple(count * config.head_dim for count in heads)
