"""Normalisation over a batch, over groups, and over the history of a run.
All statistics in float64."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from rlcli.ops.reduce import AllReduce, identity, masked_moments

__all__ = ["RunningMeanStd", "group_moments", "group_normalize", "masked_normalize"]


def masked_normalize(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    all_reduce: AllReduce = identity,
    eps: float = 1e-5,
) -> torch.Tensor:
    """(x - mean) / (std + eps) with the statistics of all ranks; same shape as `x`, float32.

    Entries outside `mask` are not read (NaN and Inf cannot leak) and come out as 0.
    """
    _, mean, variance = masked_moments(x, mask, all_reduce)
    normalized = (x.to(torch.float64) - mean) / (variance**0.5 + eps)
    return (normalized if mask is None else torch.where(mask, normalized, 0.0)).to(torch.float32)


def group_moments(
    x: torch.Tensor, group: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(count, mean, biased variance) of each group's entries that `mask` keeps, [groups] float64;
    x, group (int64, from
    0) and mask are all [n]. A group without entries has (0, 0, 0). Groups never span ranks."""
    counted, owner = x[mask].to(torch.float64), group[mask]
    n_groups = int(group.max()) + 1 if group.numel() else 0
    zeros = torch.zeros(n_groups, dtype=torch.float64, device=x.device)
    count = zeros.index_add(0, owner, torch.ones_like(counted))
    mean = zeros.index_add(0, owner, counted) / count.clamp(min=1)
    squares = zeros.index_add(0, owner, (counted - mean[owner]).square())
    return count, mean, squares / count.clamp(min=1)


def group_normalize(
    x: torch.Tensor, group: torch.Tensor, mask: torch.Tensor | None = None, *, eps: float = 1e-5
) -> torch.Tensor:
    """`masked_normalize` within each group of entries; x, group (int64, from 0)
    and mask are all [n].

    A group with a single entry becomes 0: it has nothing to be compared with.
    """
    keep = torch.ones_like(group, dtype=torch.bool) if mask is None else mask
    _, mean, variance = group_moments(x, group, keep)
    owner = group[keep]
    result = torch.zeros_like(x, dtype=torch.float32)
    result[keep] = ((x[keep].to(torch.float64) - mean[owner]) / (variance.sqrt()[owner] + eps)).to(
        torch.float32
    )
    return result


class RunningMeanStd:
    """Mean and standard deviation of everything seen so far, for value normalisation.

    "exp": exponential moving average with factor `beta` per update, corrected for its start at
    zero. "ma": plain average over all entries. Before the first update,
    neither normalises anything.
    """

    VARIANCE_FLOOR = 1e-2
    """A smaller variance would amplify noise: the standard deviation is never taken to be below
    0.1."""
    CLIP = 5.0
    """Normalised targets are clipped to ± this."""

    def __init__(
        self, kind: Literal["exp", "ma"] = "exp", beta: float = 0.99995, eps: float = 1e-5
    ):
        if kind not in ("exp", "ma"):
            raise ValueError(f"unknown running average {kind!r}; choose exp or ma")
        self.kind = kind
        self.beta = beta
        self.eps = eps
        self._mean = 0.0
        self._mean_square = 0.0
        self._weight = 0.0

    @property
    def mean(self) -> float:
        return self._mean / self._weight if self._weight else 0.0

    @property
    def std(self) -> float:
        if not self._weight:
            return 1.0
        variance = self._mean_square / self._weight - self.mean**2
        return (max(variance, self.VARIANCE_FLOOR) + self.eps) ** 0.5

    def update(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, all_reduce: AllReduce = identity
    ) -> None:
        """Include the entries that `mask` keeps, on all ranks together.

        If none is kept, or one is NaN or infinite, nothing changes: such a value would stay in the
        statistics forever.
        """
        count, mean, variance = masked_moments(x, mask, all_reduce)
        if count == 0 or not (math.isfinite(mean) and math.isfinite(variance)):
            return
        old, new = (self.beta, 1 - self.beta) if self.kind == "exp" else (1.0, count)
        self._mean = old * self._mean + new * mean
        self._mean_square = old * self._mean_square + new * (variance + mean**2)
        self._weight = old * self._weight + new

    def normalize(self, x: torch.Tensor, clip: bool = True) -> torch.Tensor:
        """(x - mean) / std as float32, clipped to ± CLIP unless `clip` is off (then `denormalize`
        is its exact inverse)."""
        normalized = (x.to(torch.float64) - self.mean) / self.std
        return (normalized.clamp(-self.CLIP, self.CLIP) if clip else normalized).to(torch.float32)

    def denormalize(self, x: torch.Tensor) -> torch.Tensor:
        """x * std + mean, as float32."""
        return (x.to(torch.float64) * self.std + self.mean).to(torch.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean, "mean_square": self._mean_square, "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mean, self._mean_square, self._weight = (
            state["mean"],
            state["mean_square"],
            state["weight"],
        )
