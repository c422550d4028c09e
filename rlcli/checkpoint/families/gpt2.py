"""GPT-2: LayerNorm, learned positions, no gate, q, k and v in one matrix, all as [in, out]."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlcli.api.family import Form, HFFamily, ModelConfig, register_hf_family
from rlcli.api.parameters import Link
from rlcli.errors import ModelError

from ._decoder import ACTIVATIONS, has_value_head, size_in

SIZES = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "vocabulary": "vocab_size",
    "positions": "n_positions",
}
NEWER = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""The same keys as other families call them; transformers accepts both."""
DEFAULTS: dict[str, Any] = {
    "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
}  # fmt: skip
READ = {*DEFAULTS, *NEWER, "n_inner", "architectures", "model_type"}


@register_hf_family("gpt2")
class GPT2(HFFamily):
    """Its modules name their parameters as its files do."""

    architecture = "GPT2LMHeadModel"
    prefix = "transformer."

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig:
        named = {NEWER.get(key, key): value for key, value in hf.items() if value is not None}
        settings: dict[str, Any] = DEFAULTS | named
        if settings.get("add_cross_attention"):
            raise ModelError("a gpt2 with cross-attention is not supported")
        activation = settings["activation_function"]
        if activation not in ACTIVATIONS:
            raise ModelError(f"a gpt2 with activation_function {activation!r} is not supported")
        sizes: dict[str, Any] = {field: size_in(settings, key) for field, key in SIZES.items()}
        return ModelConfig(
            family="gpt2",
            **sizes,
            kv_heads=settings["n_head"],
            head_dim=settings["n_embd"] // settings["n_head"],
            mlp=size_in(settings, "n_inner", 4 * settings["n_embd"]),
            tied=bool(settings["tie_word_embeddings"]),
            activation=ACTIVATIONS[activation],
            norm_eps=settings["layer_norm_epsilon"],
            gated=False,
            layer_norm=True,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            scaled_by_head=bool(settings["scale_attn_weights"]),
            scaled_by_layer=bool(settings["scale_attn_by_inverse_layer_idx"]),
            value_head=has_value_head(hf),
            others={key: value for key, value in hf.items() if key not in READ},
        )

    def config_to_hf(self, config: ModelConfig) -> dict[str, Any]:
        architecture = "GPT2ForTokenClassification" if config.value_head else self.architecture
        sizes = {key: getattr(config, field) for field, key in SIZES.items()}
        return {
            **config.others,
            "model_type": "gpt2",
            "architectures": [architecture],
            **sizes,
            "n_inner": None if config.mlp == 4 * config.hidden else config.mlp,
            "activation_function": {"gelu_tanh": "gelu_new"}.get(
                config.activation, config.activation
            ),
            "layer_norm_epsilon": config.norm_eps,
            "tie_word_embeddings": config.tied,
            "scale_attn_weights": config.scaled_by_head,
            "scale_attn_by_inverse_layer_idx": config.scaled_by_layer,
        }

    def embedding_links(self, config: ModelConfig) -> Iterator[Link]:
        yield Link("transformer.wte.weight", ("embedding.tokens.weight",))
        yield Link("transformer.wpe.weight", ("embedding.positions.weight",))

    def block_links(self, config: ModelConfig, index: int, form: Form) -> Iterator[Link]:
        theirs, ours = f"transformer.h.{index}", f"layers.{index}"
        for kind in ("weight", "bias"):
            qkv = tuple(f"{ours}.attention.{letter}.{kind}" for letter in "qkv")
            yield Link(f"{theirs}.ln_1.{kind}", (f"{ours}.attention.norm.{kind}",))
            yield Link(
                f"{theirs}.attn.c_attn.{kind}", qkv, rows=(config.hidden,) * 3, transposed=True
            )
            yield Link(
                f"{theirs}.attn.c_proj.{kind}",
                (f"{ours}.attention.output.{kind}",),
                transposed=True,
            )
            yield Link(f"{theirs}.ln_2.{kind}", (f"{ours}.mlp.norm.{kind}",))
            yield Link(f"{theirs}.mlp.c_fc.{kind}", (f"{ours}.mlp.up.{kind}",), transposed=True)
            yield Link(f"{theirs}.mlp.c_proj.{kind}", (f"{ours}.mlp.down.{kind}",), transposed=True)

    def head_links(self, config: ModelConfig) -> Iterator[Link]:
        for kind in ("weight", "bias"):
            yield Link(f"transformer.ln_f.{kind}", (f"head.norm.{kind}",))
        if config.value_head:
            for kind in ("weight", "bias"):
                yield Link(f"classifier.{kind}", (f"head.value.{kind}",))
        else:
            yield Link("lm_head.weight", ("head.output.weight",))
