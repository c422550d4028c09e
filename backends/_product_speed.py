"""How fast a processor multiplies in each dtype, measured with the sizes of a model."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from rlcli.ops.attention import Scoring, packed_attention

from ._transformers import compute_in, layers_of

NARROW = 512
"""Models with smaller hidden states spend their time between products: float32 is not slower."""
WIDEST = 512
"""Larger products are as fast, per operation, as those of this size."""
LENGTHS = (96, 32)
"""Tokens of the sequences."""
ROUNDS = 3
TOO_SLOW = 3.0
"""A dtype is not tried again after a round that took this many times as long as float32."""
_CPU = torch.device("cpu")


def seconds_by_dtype(config: Any, device: torch.device, trains: bool) -> dict[str, float]:
    """Processor seconds of one layer of a model with this `config` over 128 tokens, in float32 and
    in bfloat16; with `trains` also of its backward pass. Empty where there is nothing to measure:
    on GPUs, and for narrow models."""
    text = layers_of(config.get_text_config())[0]
    width = text.hidden_size
    if device.type != "cpu" or width < NARROW:
        return {}
    inner = _number(text, "intermediate_size", 4 * width)
    heads = _number(text, "num_attention_heads", width // 64)
    head_dim = _number(text, "head_dim", width // heads)
    shrink = max(1.0, width / WIDEST)
    sizes = (round(width / shrink), round(inner / shrink), max(1, round(heads / shrink)))
    return dict(_measured(*sizes, head_dim, trains))


def _number(config: Any, name: str, usual: int) -> int:
    """A size of a model; the usual one if it has none, or a list with one for each layer."""
    size = getattr(config, name, None)
    return size if isinstance(size, int) and size > 0 else usual


@cache
def _measured(width: int, inner: int, heads: int, head_dim: int, trains: bool) -> dict[str, float]:
    """With one thread, whose processor time does not depend on what else the machine computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _best_of_rounds(_Layer(width, inner, heads, head_dim, trains))
    finally:
        torch.set_num_threads(threads)


def _best_of_rounds(layer: _Layer) -> dict[str, float]:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    # the first round also prepares libraries and memory
    best = {name: layer.seconds(dtype) for name, dtype in dtypes.items()}
    for _ in range(ROUNDS):
        for name, dtype in dtypes.items():
            if best[name] <= TOO_SLOW * best["float32"]:
                best[name] = min(best[name], layer.seconds(dtype))
    return best


class _Layer:
    """A layer of a model, computed as our engines do."""

    def __init__(self, width: int, inner: int, heads: int, head_dim: int, trains: bool):
        self._heads = (3, heads, head_dim)
        self._trains = trains
        self._hidden = self._filled(1, sum(LENGTHS), width)
        self._to_heads = self._filled(3 * heads * head_dim, width)
        self._from_heads = self._filled(width, heads * head_dim)
        self._up = self._filled(2 * inner, width)
        self._down = self._filled(width, inner)
        self._packing = packed_attention(LENGTHS, _CPU)

    def _filled(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, 1e-2, requires_grad=self._trains)

    def seconds(self, dtype: torch.dtype) -> float:
        """Processor seconds of a forward pass and, if it trains, a backward pass."""
        began = time.thread_time()
        with torch.set_grad_enabled(self._trains):
            with compute_in(dtype, _CPU):
                result = self._mlp(self._hidden + self._attention(self._hidden))
            if self._trains:
                result.float().sum().backward()
        return time.thread_time() - began

    def _attention(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = functional.linear(hidden, self._to_heads).unflatten(-1, self._heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = self._packing.attend(query, key, value, Scoring())
        return functional.linear(attended.flatten(-2), self._from_heads)

    def _mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(hidden, self._up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self._down)
