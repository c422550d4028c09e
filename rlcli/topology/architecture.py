"""The size of a transformers model, from its config.json alone: exact parameter counts,
without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlcli.api.architecture import Architecture, TransformerBlock
from rlcli.api.model_sizes import wrong_size


class UnknownArchitecture(ValueError):
    """A configuration whose parameters cannot be counted; the text says why."""


@dataclass(frozen=True)
class _Family:
    """What distinguishes the models of one `model_type`, and transformers' defaults for keys that a
    config omits."""

    defaults: Mapping[str, Any]
    qkv_bias: str | bool = "attention_bias"
    """Whether queries, keys and values have a bias, or the key that says so."""
    output_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    norms: int = 2
    """Norms of the hidden size in a block."""
    qk_norm: bool = False
    experts: str | None = None
    """The key with the number of experts."""
    shared: str | None = None
    """The key with the width of an expert that all tokens share."""


def _defaults(
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv: int | None,
    vocabulary: int,
    positions: int,
    **overrides: Any,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "head_dim": None,
        **overrides,
    }


_FAMILIES: dict[str, _Family] = {
    "llama": _Family(
        _defaults(4096, 11008, 32, 32, None, 32000, 2048, mlp_bias=False), mlp_bias="mlp_bias"
    ),
    "mistral": _Family(
        _defaults(4096, 14336, 32, 32, 8, 32000, 131072), qkv_bias=False, output_bias=False
    ),
    "mixtral": _Family(
        _defaults(
            4096, 14336, 32, 32, 8, 32000, 131072, num_local_experts=8, num_experts_per_tok=2
        ),
        qkv_bias=False,
        output_bias=False,
        experts="num_local_experts",
    ),
    "qwen2": _Family(
        _defaults(4096, 22016, 32, 32, 32, 151936, 32768), qkv_bias=True, output_bias=False
    ),
    "qwen3": _Family(_defaults(4096, 22016, 32, 32, 32, 151936, 32768, head_dim=128), qk_norm=True),
    "qwen3_moe": _Family(
        _defaults(
            2048,
            6144,
            24,
            32,
            4,
            151936,
            32768,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        qk_norm=True,
        experts="num_experts",
    ),
    "qwen2_moe": _Family(
        _defaults(
            2048,
            5632,
            24,
            16,
            16,
            151936,
            32768,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            qkv_bias=True,
        ),
        qkv_bias="qkv_bias",
        output_bias=False,
        experts="num_experts",
        shared="shared_expert_intermediate_size",
    ),
    "gemma": _Family(
        _defaults(3072, 24576, 28, 16, 16, 256000, 8192, head_dim=256, tie_word_embeddings=True)
    ),
    "gemma2": _Family(
        _defaults(2304, 9216, 26, 8, 4, 256000, 8192, head_dim=256, tie_word_embeddings=True),
        norms=4,
    ),
    "gemma3_text": _Family(
        _defaults(2304, 9216, 26, 8, 4, 262208, 131072, head_dim=256, tie_word_embeddings=True),
        norms=4,
        qk_norm=True,
    ),
    "smollm3": _Family(
        _defaults(2048, 11008, 36, 16, 4, 128256, 32768, mlp_bias=False, tie_word_embeddings=True),
        mlp_bias="mlp_bias",
    ),
}

KNOWN_TYPES = tuple(sorted([*_FAMILIES, "gpt2"]))
"""Values of `model_type` whose parameters can be counted."""

_ALIASES = {"num_experts": ("num_experts", "num_local_experts")}


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The sizes described by a config.json. Raises UnknownArchitecture."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return replace(_sizes(config), stored_width=2 if dtype in ("bfloat16", "float16") else 4)


def _sizes(config: Mapping[str, Any]) -> Architecture:
    model_type = config.get("model_type")
    if model_type == "gpt2":
        return _gpt2(config)
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise UnknownArchitecture(
            f"the parameters of model_type {model_type} cannot be counted here"
        )
    settings = {**family.defaults, **_renamed(config)}
    widths = _widths(settings)
    depth = _size(settings, "num_hidden_layers")
    layers = tuple(_layer(family, settings, widths, index) for index in range(depth))
    vocabulary = _size(settings, "vocab_size")
    experts_per_token, experts = _experts(family, settings)
    return Architecture(
        model_type=str(model_type),
        hidden=widths.hidden,
        heads=widths.heads,
        kv_heads=widths.kv_heads,
        head_dim=widths.head_dim,
        mlp=widths.expert if family.experts else widths.mlp,
        vocabulary=vocabulary,
        positions=settings.get("max_position_embeddings"),
        position_rows=0,
        tied=bool(settings["tie_word_embeddings"]),
        qk_norm=family.qk_norm,
        gated=True,
        experts_per_token=experts_per_token,
        layers=layers,
        final_norm=widths.hidden,
        experts=experts,
    )


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys renamed to those that transformers reads, whatever name they were written with."""
    renamed = {key: value for key, value in config.items() if value is not None}
    for name, others in _ALIASES.items():
        for alias in others:
            if alias in renamed:
                renamed.setdefault(name, renamed[alias])
    return renamed


def _experts(family: _Family, settings: Mapping[str, Any]) -> tuple[int, int]:
    """(experts of a token, experts of a layer); 0 for a dense model."""
    if not family.experts:
        return 0, 0
    return _size(settings, "num_experts_per_tok"), _size(settings, family.experts)


@dataclass(frozen=True)
class _Widths:
    """The widths that all layers have in common."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    expert: int
    """Of the MLP of an expert."""


def _widths(settings: Mapping[str, Any]) -> _Widths:
    hidden, heads = _size(settings, "hidden_size"), _size(settings, "num_attention_heads")
    kv_heads = _size(settings, "num_key_value_heads", heads)
    head_dim = _size(settings, "head_dim", hidden // heads)
    mlp = _size(settings, "intermediate_size")
    expert = _size(settings, "moe_intermediate_size", mlp)
    return _Widths(hidden, heads, kv_heads, head_dim, mlp, expert)


def _layer(
    family: _Family, settings: Mapping[str, Any], widths: _Widths, index: int
) -> TransformerBlock:
    hidden = widths.hidden
    norms = family.norms * hidden + 2 * widths.head_dim * family.qk_norm
    attention = _attention(family, settings, widths)
    if not (family.experts and _is_sparse(settings, index)):
        mlp = 3 * hidden * widths.mlp
        biases = (2 * widths.mlp + hidden) * _has(family.mlp_bias, settings)
        return TransformerBlock(attention, mlp + biases, 0, norms)
    count = _size(settings, family.experts)
    shared = 3 * hidden * _size(settings, family.shared) + hidden if family.shared else 0
    experts = count * 3 * hidden * widths.expert
    return TransformerBlock(attention, count * hidden, experts, norms, shared)


def _attention(family: _Family, settings: Mapping[str, Any], widths: _Widths) -> int:
    queries = widths.heads * widths.head_dim
    projected = queries + 2 * widths.kv_heads * widths.head_dim
    weights = widths.hidden * (projected + queries)
    qkv_bias = projected * _has(family.qkv_bias, settings)
    return weights + qkv_bias + widths.hidden * _has(family.output_bias, settings)


def _is_sparse(settings: Mapping[str, Any], index: int) -> bool:
    every = settings.get("decoder_sparse_step", 1)
    return index not in settings.get("mlp_only_layers", ()) and (index + 1) % every == 0


_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""General name of a key → the name that gpt2 has for it."""
_GPT2_DEFAULTS = {
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def _gpt2(config: Mapping[str, Any]) -> Architecture:
    settings: dict[str, Any] = {**_GPT2_DEFAULTS}
    for key, value in config.items():
        if value is not None:
            settings[_GPT2_NAMES.get(key, key)] = value
    if settings.get("add_cross_attention"):
        raise UnknownArchitecture("a gpt2 with cross-attention cannot be counted here")
    hidden, positions = _size(settings, "n_embd"), _size(settings, "n_positions")
    width = _size(settings, "n_inner", 4 * hidden)
    layer = TransformerBlock(
        attention=4 * hidden * hidden + 4 * hidden,
        mlp=2 * hidden * width + width + hidden,
        experts=0,
        norms=4 * hidden,
    )
    heads = _size(settings, "n_head")
    return Architecture(
        model_type="gpt2",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp=width,
        vocabulary=_size(settings, "vocab_size"),
        positions=positions,
        position_rows=positions,
        tied=bool(settings.get("tie_word_embeddings", True)),
        qk_norm=False,
        gated=False,
        experts_per_token=0,
        layers=(layer,) * _size(settings, "n_layer"),
        final_norm=2 * hidden,
    )


def _has(key: str | bool, settings: Mapping[str, Any]) -> bool:
    return key if isinstance(key, bool) else bool(settings.get(key))


def _size(settings: Mapping[str, Any], key: str, otherwise: int | None = None) -> int:
    value = settings.get(key)
    if value is None:
        value = otherwise
    if wrong := wrong_size(key, value):
        raise UnknownArchitecture(wrong)
    assert isinstance(value, int)
    if value < 1:
        raise UnknownArchitecture(f"{key} in its configuration is {value}, not a size")
    return value
