"""The functions of flash-attn in plain torch, for CUDA devices without its kernels.

    with pretend_cuda() as device, flash_attn_installed("FlashAttention-2"):
        ...  # `attention: flash` works

Each takes exactly the parameters that were recorded from the library's own source distribution
(`fake_flash_attn.json`). They compute what the kernels compute, with the scores of a sequence in
memory, and refuse what the kernels refuse.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from inspect import Parameter, Signature
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rlcli.ops.flash_attention import LIBRARIES, Library

RECORD = Path(__file__).with_name("fake_flash_attn.json")
"""Distribution → version, sha256 of its source distribution, and for each library in it the
parameters of `flash_attn_varlen_func`: `required` names, and `optional` ones with defaults."""

COMPUTED = {
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
    "softmax_scale", "causal", "window_size", "softcap", "deterministic",
}  # fmt: skip
"""Parameters that the functions in this file understand; others must have their defaults."""


@contextlib.contextmanager
def flash_attn_installed(*names: str) -> Iterator[None]:
    """Let the libraries of these names be imported, and no others."""
    modules: dict[str, Any] = {library.module: None for library in LIBRARIES}
    for library in LIBRARIES:
        if library.name in names:
            module = ModuleType(library.module)
            module.__spec__ = ModuleSpec(library.module, None)  # transformers looks at it
            module.flash_attn_varlen_func = varlen_function(library)  # type: ignore[attr-defined]
            modules[library.module] = module
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


def recorded_signature(library: Library) -> Signature:
    """The signature of the library's `flash_attn_varlen_func`."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    described = (package["functions"] for package in record.values())
    (parameters,) = (of[library.name] for of in described if library.name in of)
    return signature_of(parameters)


def signature_of(parameters: Mapping[str, Any]) -> Signature:
    """From the parameters of a record; lists in it are tuples."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    named = [Parameter(name, kind) for name in parameters["required"]]
    for name, value in parameters["optional"].items():
        default = tuple(value) if isinstance(value, list) else value
        named.append(Parameter(name, kind, default=default))
    return Signature(named)


def varlen_function(library: Library) -> Callable[..., Any]:
    """`flash_attn_varlen_func` of the library, in plain torch."""
    signature = recorded_signature(library)

    def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        for name, parameter in signature.parameters.items():
            if name not in COMPUTED and values[name] != parameter.default:
                raise NotImplementedError(f"{library.name} in plain torch has no {name}")
        out, normalizers = _attend(library, values)
        return (out, normalizers) if "return_lse" in values else out

    flash_attn_varlen_func.__signature__ = signature  # type: ignore[attr-defined]
    return flash_attn_varlen_func


def _attend(library: Library, values: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H, D], and the log-sum-exp [H, T] of the scores."""
    query, key, value = states = [values[name] for name in "qkv"]
    _refuse(library, *states)
    rows = _sequences(values["cu_seqlens_q"], values["max_seqlen_q"], len(query))
    columns = _sequences(values["cu_seqlens_k"], values["max_seqlen_k"], len(key))
    results, normalizers = [], []
    for of_query, of_key in zip(rows, columns, strict=True):
        q, k, v = (_heads(x, query) for x in (query[of_query], key[of_key], value[of_key]))
        scores = _scores(q, k, values)
        results.append((scores.softmax(-1) @ v).transpose(0, 1))
        normalizers.append(scores.logsumexp(-1))
    return torch.cat(results).to(query.dtype), torch.cat(normalizers, 1)


def _heads(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[t, H_kv, D] → [H, t, D] float32: each head serves a group of query heads."""
    return states.float().transpose(0, 1).repeat_interleave(query.shape[1] // states.shape[1], 0)


def _scores(q: torch.Tensor, k: torch.Tensor, values: Mapping[str, Any]) -> torch.Tensor:
    """[H, queries, keys] of one sequence, -inf for hidden keys."""
    scores = q @ k.transpose(1, 2) * (values["softmax_scale"] or q.shape[-1] ** -0.5)
    if cap := values["softcap"]:
        scores = cap * torch.tanh(scores / cap)
    seen = _seen(q.shape[1], k.shape[1], values["causal"], values["window_size"])
    return scores.masked_fill(~seen.to(scores.device), -torch.inf)


def _refuse(library: Library, *states: torch.Tensor) -> None:
    query, key, value = states
    if not all(x.is_cuda for x in states):
        raise RuntimeError("flash-attn computes on CUDA only")
    dtypes = {x.dtype for x in states}
    if len(dtypes) > 1 or not dtypes <= {torch.float16, torch.bfloat16}:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if query.shape[-1] > library.largest_head or query.shape[-1] % 8:
        raise RuntimeError(f"{library.name} has no heads of {query.shape[-1]} numbers")
    if any(x.stride(-1) != 1 for x in states):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if key.shape != value.shape or query.shape[1] % key.shape[1]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")


def _sequences(starts: torch.Tensor, longest: int, tokens: int) -> list[slice]:
    if starts.dtype is not torch.int32 or not starts.is_cuda:
        raise RuntimeError("cu_seqlens must have dtype int32, and be on the device")
    bounds = starts.cpu().tolist()
    lengths = [end - begin for begin, end in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != tokens or longest < max(lengths):
        raise RuntimeError("cu_seqlens and max_seqlen do not describe these tokens")
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def _seen(
    queries: int, keys: int, is_causal: bool, window: tuple[int | None, int | None]
) -> torch.Tensor:
    """[queries, keys] bool; the last query is aligned with the last key. None and negative limits
    of a window mean all."""
    before, after = window
    offset = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    seen = offset <= 0 if is_causal else torch.ones_like(offset, dtype=torch.bool)
    if before is not None and before >= 0:
        seen &= offset >= -before
    if after is not None and after >= 0:
        seen &= offset <= after
    return seen
