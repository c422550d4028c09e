"""Operations that torch has only on CUDA, written for the host: attention over packed sequences,
and histograms of integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import varlen  # noqa: F401 - registers the operations


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor | None,
    longest: int,
    longest_key: int,
    is_causal: bool = False,
    scale: float | None = None,
    window: Sequence[int] | None = None,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For queries [T, H, D]: the result [T, H, D], log-sum-exp [H, T] float32,
    and an unused random state."""
    if any(option is not None and option is not False and option is not True for option in others):
        raise NotImplementedError("the pretend device has no paged keys and values")
    out, normalizers = _attend(query, key, value, starts, key_starts, is_causal, scale, window)
    return out.to(query.dtype), normalizers, torch.zeros(2, dtype=torch.uint64)


def attend_packed_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    normalizers: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest: int,
    longest_key: int,
    is_causal: bool,
    random_state: torch.Tensor,
    scale: float | None = None,
    window: Sequence[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of queries, keys and values. As in the kernel, the weights follow from
    `normalizers` and the softmax's own gradient from `out`: where other keys count as well, both
    are those of all keys."""
    grads = [torch.zeros(x.shape) for x in (query, key, value)]
    for rows, columns, seen in _sequences(starts, key_starts, is_causal, window):
        q, g, o = (_heads(x[rows], query) for x in (query, grad, out))
        k, v = (_heads(x[columns], query) for x in (key, value))
        factor = _factor(query, scale)
        scores = (q @ k.transpose(1, 2) * factor).masked_fill(~seen, -torch.inf)
        weights = (scores - normalizers[:, rows, None]).exp()
        by_score = weights * (g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True)) * factor
        shares = (by_score @ k, by_score.transpose(1, 2) @ q, weights.transpose(1, 2) @ g)
        for total, span, share in zip(grads, (rows, columns, columns), shares, strict=True):
            total[span] += share.unflatten(0, (total.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(total.to(query.dtype) for total in grads)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    window: Sequence[int] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    results, normalizers = [], []
    for rows, columns, seen in _sequences(starts, key_starts, is_causal, window):
        q, k, v = (
            _heads(query[rows], query),
            _heads(key[columns], query),
            _heads(value[columns], query),
        )
        scores = (q @ k.transpose(1, 2) * _factor(query, scale)).masked_fill(~seen, -torch.inf)
        normalizers.append(scores.logsumexp(-1))
        results.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(results), torch.cat(normalizers, 1)


def _heads(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[t, H_kv, D] → [H, t, D] float32: each head of keys and values serves a group of query
    heads."""
    return states.float().transpose(0, 1).repeat_interleave(query.shape[1] // states.shape[1], 0)


def _factor(query: torch.Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5 if scale is None else scale)


def _sequences(
    starts: torch.Tensor,
    key_starts: torch.Tensor | None,
    is_causal: bool,
    window: Sequence[int] | None,
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """For each sequence the rows of its queries and of its keys, and the mask [queries,
    keys] of visible ones."""
    before, after = window or (-1, -1)
    bounds, key_bounds = starts.tolist(), (starts if key_starts is None else key_starts).tolist()
    for begin, end, first, last in zip(
        bounds, bounds[1:], key_bounds, key_bounds[1:], strict=False
    ):
        yield (
            slice(begin, end),
            slice(first, last),
            _seen(end - begin, last - first, before, 0 if is_causal else after),
        )


def _seen(queries: int, keys: int, before: int, after: int) -> torch.Tensor:
    """[queries, keys] bool; the last query is aligned with the last key.
    A negative limit means none."""
    offset = torch.arange(keys)[None] - (torch.arange(queries)[:, None] + keys - queries)
    seen = torch.ones_like(offset, dtype=torch.bool)
    if after >= 0:
        seen &= offset <= after
    if before >= 0:
        seen &= offset >= -before
    return seen


def count_integers(
    numbers: torch.Tensor, bins: int, min: int | float = 0, max: int | float = 0
) -> torch.Tensor:
    """How many of the integers [n] fall into each of the `bins` parts of [min, max]."""
    return torch.histc(numbers.double(), bins, min, max).to(numbers.dtype)


KERNELS: dict[Any, Callable[..., Any]] = {
    torch.ops.torch_attn._varlen_attn.default: attend_packed,
    torch.ops.torch_attn._varlen_attn_backward.default: attend_packed_backward,
    torch.ops.aten.histc.default: count_integers,
}
