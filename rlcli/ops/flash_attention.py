"""Attention by the kernels of flash-attn (https://arxiv.org/abs/2307.08691), where a version of it
is installed for the GPU. Neither they nor torch are imported with this file.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rlcli.ops.attention import Kernels, Scoring
    from rlcli.ops.packing import Bounds


@dataclass(frozen=True)
class Library:
    """A version of flash-attn, and what it computes."""

    name: str
    module: str
    """The module that has `flash_attn_varlen_func`."""
    capabilities: tuple[int, ...]
    """Major compute capabilities of its GPUs."""
    largest_head: int
    """Largest size of a head, forward and backward."""
    unlimited: int | None
    """Stands for all tokens in a window."""


LIBRARIES = (
    Library("FlashAttention-3", "flash_attn_interface", (9,), 256, -1),
    Library("FlashAttention-4", "flash_attn.cute", (9, 10, 11, 12), 128, None),
    Library("FlashAttention-2", "flash_attn", (8, 9, 10, 12), 256, -1),
)
"""In order of preference, for a GPU that several of them support."""


class FlashAttention:
    """The function of one of the libraries."""

    def __init__(self, library: Library, attend: Callable[..., Any]):
        self.library = library
        self._attend = attend

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        queries: Bounds,
        keys: Bounds,
        scoring: Scoring,
    ) -> torch.Tensor:
        """[T, H, D] for queries [T, H, D], keys and values [K, H_kv, D] in 16 bits, where the
        queries are those of the last tokens of each sequence."""
        out = self._attend(query, key, value, **arguments(self.library, queries, keys, scoring))
        return out[0] if isinstance(out, tuple) else out  # some also return the log-sum-exp


def arguments(library: Library, queries: Bounds, keys: Bounds, scoring: Scoring) -> dict[str, Any]:
    """The arguments of `flash_attn_varlen_func` other than queries, keys and values."""
    window = scoring.window_within(keys.longest)
    return {
        "cu_seqlens_q": queries.starts,
        "cu_seqlens_k": keys.starts,
        "max_seqlen_q": queries.longest,
        "max_seqlen_k": keys.longest,
        "softmax_scale": scoring.scale,
        "causal": True,
        "window_size": (library.unlimited if window is None else window - 1, 0),
        "softcap": scoring.softcap or 0.0,
    }


def flash_attention(
    kernels: Kernels, device: torch.device, is_narrow: bool, head_dim: int
) -> FlashAttention | None:
    """What attends to packed sequences on a device, for a model that computes in 16 bits or not;
    None: torch does. Raises ValueError, with the reason, if `flash` cannot be had."""
    if kernels == "torch":
        return None
    if (reason := _unsuitable(device, is_narrow)) is not None:
        if kernels == "flash":
            raise ValueError(reason)
        return None
    import torch

    capability, _ = torch.cuda.get_device_capability(device)
    reasons = []
    for library in LIBRARIES:
        loaded = _loaded(library, capability, head_dim)
        if isinstance(loaded, FlashAttention):
            return loaded
        reasons.append(f"{library.name}: {loaded}")
    if kernels == "flash":
        raise ValueError("; ".join(reasons))
    return None


def _unsuitable(device: torch.device, is_narrow: bool) -> str | None:
    if device.type != "cuda":
        return f"flash-attn computes on CUDA devices, not on {device.type}"
    return None if is_narrow else "flash-attn computes in 16 bits, not in float32"


def _loaded(library: Library, capability: int, head_dim: int) -> FlashAttention | str:
    """The library's function, or why it cannot be used. An installation that is broken, for example
    built against another version of torch, is reported even where torch takes its place."""
    if capability not in library.capabilities:
        return f"not for GPUs of compute capability {capability}.x"
    if head_dim > library.largest_head or head_dim % 8:
        return f"heads of up to {library.largest_head} numbers, a multiple of 8, not {head_dim}"
    try:
        attend = import_module(library.module).flash_attn_varlen_func
    except ModuleNotFoundError as error:
        return str(error)
    except (ImportError, AttributeError, OSError) as error:
        warnings.warn(f"{library.name} is installed, but cannot be used: {error}", stacklevel=2)
        return str(error)
    missing = _missing_parameters(attend)
    return f"a version without {', '.join(missing)}" if missing else FlashAttention(library, attend)


def _missing_parameters(attend: Callable[..., Any]) -> list[str]:
    from rlcli.ops.attention import Scoring
    from rlcli.ops.packing import Bounds

    offered = inspect.signature(attend).parameters
    none = Bounds.of(())
    passed = arguments(LIBRARIES[0], none, none, Scoring())
    return [name for name in passed if name not in offered]
