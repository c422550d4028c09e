"""A decoder's forward pass from our configuration and parameters alone:
the reference for every family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional as F

from rlcli.api.family import ModelConfig

Weights = Mapping[str, torch.Tensor]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def logits(config: ModelConfig, ours: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """[B, T] tokens to [B, T, vocabulary] logits, or [B, T, 1] values."""
    hidden = ours["embedding.tokens.weight"][tokens] * config.embedding_scale
    if config.rope is None:
        hidden = hidden + ours["embedding.positions.weight"][: tokens.shape[1]]
    for index in range(config.layers):
        block = _below(ours, f"layers.{index}.")
        hidden = hidden + _attention(
            config, block, _norm(config, block, "attention.norm", hidden), index
        )
        normed = _norm(config, block, "mlp.norm", hidden)
        is_sparse = config.experts is not None and index in config.experts.layers
        hidden = hidden + (
            _mixture(config, block, normed) if is_sparse else _mlp(config, block, "mlp", normed)
        )
    hidden = _norm(config, ours, "head.norm", hidden)
    if config.value_head:
        return _linear(ours, "head.value", hidden)
    return hidden @ ours["embedding.tokens.weight" if config.tied else "head.output.weight"].T


def _attention(
    config: ModelConfig, block: Weights, hidden: torch.Tensor, index: int
) -> torch.Tensor:
    heads = {"q": config.heads, "k": config.kv_heads, "v": config.kv_heads}
    q, k, v = (
        _linear(block, f"attention.{name}", hidden).unflatten(-1, (count, -1))
        for name, count in heads.items()
    )
    if config.qk_norm:
        q = _norm(config, block, "attention.q_norm", q)
        k = _norm(config, block, "attention.k_norm", k)
    if config.rope is not None:
        q, k = _rotate(config, q), _rotate(config, k)
    places = torch.arange(hidden.shape[1])
    distance = places[:, None] - places[None, :]
    window = config.windows[index] if config.windows else None
    scale = config.head_dim**-0.5 if config.scaled_by_head else 1.0
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=(distance >= 0) & (distance < (window or len(places))),
        scale=scale / (index + 1) if config.scaled_by_layer else scale,
        enable_gqa=True,
    )
    return _linear(block, "attention.output", mixed.transpose(1, 2).flatten(2))


def _rotate(config: ModelConfig, x: torch.Tensor) -> torch.Tensor:
    """Queries or keys [B, T, heads, head_dim], turned by the angles of their positions."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    assert config.rope is not None
    like = LlamaConfig(
        hidden_size=config.head_dim,
        num_attention_heads=1,
        head_dim=config.head_dim,
        max_position_embeddings=config.positions,
        rope_parameters={
            "rope_type": "default",
            **config.rope.scaling,
            "rope_theta": config.rope.base,
        },
    )
    angles = LlamaRotaryEmbedding(like)(x, torch.arange(x.shape[1])[None])
    cos, sin = (part[:, :, None] for part in angles)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _mixture(config: ModelConfig, block: Weights, hidden: torch.Tensor) -> torch.Tensor:
    assert config.experts is not None
    weights, chosen = (
        _linear(block, "mlp.router", hidden).softmax(-1).topk(config.experts.per_token, -1)
    )
    if config.experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    every = torch.stack(
        [_mlp(config, block, f"mlp.experts.{e}", hidden) for e in range(config.experts.count)], -2
    )
    picked = every.gather(-2, chosen[..., None].expand(*chosen.shape, hidden.shape[-1]))
    mixed = (picked * weights[..., None]).sum(-2)
    if not config.experts.shared:
        return mixed
    shared = "mlp.shared_expert"
    scale = _linear(block, f"{shared}.router", hidden).sigmoid()
    return mixed + scale * _mlp(config, block, shared, hidden)


def _mlp(config: ModelConfig, block: Weights, name: str, hidden: torch.Tensor) -> torch.Tensor:
    activate, up = ACTIVATIONS[config.activation], _linear(block, f"{name}.up", hidden)
    inner = activate(_linear(block, f"{name}.gate", hidden)) * up if config.gated else activate(up)
    return _linear(block, f"{name}.down", inner)


def _norm(config: ModelConfig, ours: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    weight = ours[f"{name}.weight"] + config.norm_offset
    if config.layer_norm:
        return F.layer_norm(x, x.shape[-1:], weight, ours[f"{name}.bias"], config.norm_eps)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_eps) * weight


def _linear(ours: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, ours[f"{name}.weight"], ours.get(f"{name}.bias"))


def _below(ours: Weights, prefix: str) -> Weights:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in ours.items()
        if name.startswith(prefix)
    }
