"""Log-probs and entropies of tokens without ever holding [tokens, vocab].

The head's matrix product, softmax and gather run over chunks of tokens; the backward pass
recomputes each chunk but the last, with which it begins. Memory is a few times [chunk, vocab]
instead of [tokens, vocab]. The head may be sharded
over ranks by vocabulary rows: a chunk then costs two all-reduces of vectors, and the backward pass
one of the hidden states' gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from rlcli.ops.packed_product import product
from rlcli.ops.vocabulary import VocabularyShard

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once, in elements: 64 MiB of float32."""


@dataclass(frozen=True)
class OutputHead:
    """How hidden states become logits: softcap · tanh(scale · (h Wᵀ + b) / softcap)
    / temperature."""

    weight: torch.Tensor
    """[V, H], or the rows of it that `shard` describes; for `logits` it may be packed"""
    bias: torch.Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    temperature: float = 1.0
    shard: VocabularyShard | None = None
    """The rows that `weight` and `bias` are, if this rank holds a part of the vocabulary."""

    def logits(self, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[n, V] float32, only its own columns for a shard; the matrix product runs in `dtype`."""
        raw = product(hidden.to(dtype), self.weight.to(dtype))
        logits = raw.float()
        if self.bias is not None:
            logits = logits + self.bias.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature if self.temperature != 1.0 else logits

    def whole_logits(self, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[n, V] float32, also for a shard: the logits are gathered, so for few rows only."""
        logits = self.logits(hidden, dtype)
        return logits if self.shard is None else self.shard.gathered(logits)


def token_scores(
    hidden: torch.Tensor,
    head: OutputHead,
    tokens: torch.Tensor,
    *,
    entropy: bool = False,
    dtype: torch.dtype = torch.float32,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of `tokens` [n] under `head` applied to `hidden` [n, H],
    and the entropy of each distribution.

    Both are [n] float32 and differentiable in the hidden states and in the head's weight and bias.
    The product runs in `dtype`, softmax in float32. `chunk` is the number of tokens whose logits
    are held at once.

    With a sharded head, every rank of its group calls this with the same hidden states and tokens,
    and gets the same scores, the whole gradient of the hidden states, and the gradient of its own
    rows. The loss must be the same function of the scores on every rank.
    """
    width = head.weight.shape[0] if head.shard is None else head.shard.typical_rows
    rows = chunk or max(1, CHUNK_ELEMENTS // width)
    logprobs, entropies = _TokenScores.apply(
        hidden, head.weight, head.bias, tokens, head, entropy, dtype, rows
    )
    return logprobs, entropies if entropy else None


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        head: OutputHead,
        entropy: bool,
        dtype: torch.dtype,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(len(tokens), device=hidden.device)
        entropies = torch.zeros(len(tokens), device=hidden.device)
        normalizers = torch.empty(len(tokens), device=hidden.device)
        cast = _cast(head, weight, bias, dtype)
        logits = None
        for chunk in _chunks(len(tokens), rows):
            logits = cast.logits(hidden[chunk], dtype)
            normalizers[chunk], targets, expected = _statistics(
                cast, logits, tokens[chunk], entropy
            )
            logprobs[chunk] = targets - normalizers[chunk]
            if entropy:
                entropies[chunk] = normalizers[chunk] - expected
        ctx.save_for_backward(hidden, weight, bias, tokens, normalizers, entropies, logits)
        ctx.settings = head, dtype, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropies: torch.Tensor | None
    ) -> Any:
        hidden, weight, bias, tokens, normalizers, entropies, logits = ctx.saved_tensors
        head, dtype, rows = ctx.settings
        cast = _cast(head, weight, bias, dtype)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizers)
        of_entropies = None if grad_entropies is None else torch.stack([grad_entropies, entropies])
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = _Sum(weight) if ctx.needs_input_grad[1] else None
        grad_bias = _Sum(bias) if bias is not None else None
        for chunk in reversed(_chunks(len(tokens), rows)):
            if logits is None:  # those of the last chunk are there
                logits = cast.logits(hidden[chunk], dtype)
            of_chunk = None if of_entropies is None else of_entropies[:, chunk]
            grad = _grad_of_logits(logits, normalizers[chunk], grad_logprobs[chunk], of_chunk)
            _add_at(grad, tokens[chunk], grad_logprobs[chunk], head.shard)
            grad = _through_head(grad, logits, head).to(dtype)
            logits = None
            grad_hidden[chunk] = (grad @ cast.weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.add(grad.t() @ hidden[chunk].to(dtype))
            if grad_bias is not None:
                grad_bias.add(grad.float().sum(0))
        if head.shard is not None:
            grad_hidden = head.shard.summed(grad_hidden)
        of_parameters = (
            None if each is None else each.total() for each in (grad_weight, grad_bias)
        )
        return grad_hidden, *of_parameters, None, None, None, None, None


def _chunks(count: int, rows: int) -> list[slice]:
    return [slice(begin, begin + rows) for begin in range(0, count, rows)]


class _Sum:
    """The gradient of a parameter as a sum over chunks, in float32."""

    def __init__(self, parameter: torch.Tensor):
        self._parameter = parameter
        self._total: torch.Tensor | None = None

    def add(self, of_chunk: torch.Tensor) -> None:
        of_chunk = of_chunk.float()
        self._total = of_chunk if self._total is None else self._total.add_(of_chunk)

    def total(self) -> torch.Tensor:
        """In the dtype of the parameter."""
        if self._total is None:
            return torch.zeros_like(self._parameter)
        return self._total.to(self._parameter.dtype)


def _grad_of_logits(
    logits: torch.Tensor,
    normalizers: torch.Tensor,
    grad_logprobs: torch.Tensor,
    of_entropies: torch.Tensor | None,
) -> torch.Tensor:
    """[n, V]: the gradient of the final logits, except what is added at each token itself, from
    those of the log-probs [n]; `of_entropies` [2, n]: gradients and entropies, if there are any."""
    log_p = logits - normalizers[:, None]
    if of_entropies is None:
        return log_p.exp_().mul_(-grad_logprobs[:, None])
    grad_entropies, entropies = of_entropies[:, :, None]
    factors = (log_p + entropies).mul_(-grad_entropies).sub_(grad_logprobs[:, None])
    return log_p.exp_().mul_(factors)


def _statistics(
    head: OutputHead, logits: torch.Tensor, tokens: torch.Tensor, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log Σ exp, the logit of each token and, if requested, Σ p · logit: [n] each,
    over the whole vocabulary."""
    normalizers = logits.logsumexp(-1)
    expected = torch.zeros_like(normalizers)
    if entropy:
        log_p = logits - normalizers[:, None]
        expected = torch.linalg.vecdot(log_p.exp(), log_p)
        expected += normalizers.clamp(min=torch.finfo(torch.float32).min)  # a shard may be empty
    if head.shard is None:
        return normalizers, logits.gather(1, tokens[:, None])[:, 0], expected
    return head.shard.combine(normalizers, head.shard.select(logits, tokens), expected)


def _add_at(
    grad: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor, shard: VocabularyShard | None
) -> None:
    """Add `values` [n] to `grad` [n, V or own rows] at `tokens`."""
    if shard is None:
        grad.scatter_add_(1, tokens[:, None], values[:, None].to(grad.dtype))
    else:
        shard.add_at(grad, tokens, values)


def _cast(
    head: OutputHead, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> OutputHead:
    """The head with its weight in the product's dtype, cast once instead of once per chunk."""
    return replace(head, weight=weight.to(dtype), bias=bias)


def _through_head(grad: torch.Tensor, logits: torch.Tensor, head: OutputHead) -> torch.Tensor:
    """The gradient with respect to h Wᵀ + b, from the gradient with respect to the final logits."""
    factor = head.scale / head.temperature
    if head.softcap is not None:
        tanh = logits * head.temperature / head.softcap
        grad = grad * (1 - tanh * tanh)
    return grad if factor == 1.0 else grad.mul_(factor)
