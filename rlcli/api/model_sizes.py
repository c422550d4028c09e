"""The sizes in a model's configuration, checked before anything is built:
no real model has a billion layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "num_encoder_layers",
)
MOST_LAYERS = 10_000
SIZES = (
    "hidden_size", "n_embd", "d_model", "embedding_size", "intermediate_size",
    "moe_intermediate_size", "ffn_dim", "n_inner", "num_attention_heads", "n_head", "num_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "n_positions",
    "n_ctx", "num_experts", "num_local_experts", "n_routed_experts",
    "num_experts_per_tok",
)  # fmt: skip
BY_LAYER = ("intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
"""Those that some families, such as Gemma 3n, have as a list with one for each layer."""
MOST = 1 << 28
"""Maximum of any other size. Today's longest contexts and largest vocabularies are far smaller."""


def wrong_size(key: str, value: Any) -> str | None:
    """Why a value is not a possible size `key` of a model; None if it is."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return f"{key} is {shown(value)}, not a size"
    most = MOST_LAYERS if key in LAYERS else MOST
    return f"{key} is {shown(value)}; no model has more than {most}" if value > most else None


def wrong_sizes(config: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the sizes in a transformers configuration, including its inner ones
    (`text_config`).

    Only keys that determine how much memory a model takes are checked; null stands for a default.
    """
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            yield from wrong_sizes(value)
        elif key in (*LAYERS, *SIZES) and value is not None:
            sizes = value if isinstance(value, list) and key in BY_LAYER else [value]
            yield from filter(None, (wrong_size(key, size) for size in sizes))


def shown(value: Any) -> str:
    """A value from a file, shortened to fit in a message."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
