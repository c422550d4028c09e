"""How far tensors and weights are from those expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch

from rlcli.testing.contract import Violation

Weights = dict[str, torch.Tensor]
"""By their names."""

SMALL = 1e-2
"""Weights that are all smaller, such as biases that started at zero, are compared at this scale,
that of the steps."""


def distance(actual: torch.Tensor, expected: torch.Tensor, least: float = 1e-12) -> float:
    """Largest difference, relative to the largest expected value or to `least`; infinite for a
    wrong shape or NaN."""
    actual, expected = actual.cpu(), expected.cpu()
    if actual.shape != expected.shape or not bool(actual.isfinite().all()):
        return float("inf")
    if not expected.numel():
        return 0.0
    return float(
        (actual.double() - expected.double()).abs().max() / expected.abs().max().clamp(min=least)
    )


def weights_apart(
    actual: Mapping[str, torch.Tensor], expected: Weights, certain: Weights | None = None
) -> float:
    """Largest difference of any weight, relative to the largest in its tensor; only of the
    `certain` ones, if given."""
    worst = 0.0
    for name, weight in expected.items():
        if name not in actual or actual[name].shape != weight.shape:
            return float("inf")
        compared = actual[name]
        if certain is not None:
            compared = compared.where(certain[name], weight) if name in certain else weight
        worst = max(worst, distance(compared, weight, SMALL))
    return worst


def require_same(
    quantity: str,
    actual: Iterable[torch.Tensor],
    expected: Iterable[torch.Tensor],
    occasion: str,
    cause: str,
    where: str,
) -> None:
    """Raises `Violation` unless all tensors are those expected, bit for bit."""
    differ = [not torch.equal(*pair) for pair in zip(actual, expected, strict=True)]
    if any(differ):
        finding = f"{sum(differ)} of {len(differ)} {quantity} differ {occasion}"
        raise Violation(finding, cause, where)


def require_same_weights(
    actual: Weights, expected: Weights, occasion: str, cause: str, where: str
) -> None:
    """Raises `Violation` unless all weights are those expected, bit for bit."""
    differ = [
        name
        for name, weight in expected.items()
        if name not in actual or not torch.equal(actual[name], weight)
    ]
    if differ:
        raise Violation(
            f"{len(differ)} of {len(expected)} weights differ {occasion}, by up to "
            f"{weights_apart(actual, expected):.2g} of the largest value; one is {differ[0]}",
            cause,
            where,
        )


def require_close(
    quantity: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
    cause: str,
    where: str,
) -> None:
    """Raises `Violation` if `actual` differs from `expected`."""
    if actual.shape != expected.shape:
        finding = f"shape {tuple(actual.shape)} in place of {tuple(expected.shape)}"
        raise Violation(f"{quantity}: {finding}", cause, where)
    apart = distance(actual, expected)
    if apart > tolerance:
        raise Violation(f"{quantity}: off by {apart:.2g} of the largest value", cause, where)


def require_small(
    quantity: str, apart: float, tolerance: float, occasion: str, cause: str, where: str
) -> None:
    """Raises `Violation` for a relative difference above the tolerance."""
    if apart > tolerance:
        raise Violation(f"{quantity} are off by {apart:.2g} {occasion}", cause, where)


def require_number(
    name: str,
    actual: float,
    expected: float,
    tolerance: float,
    occasions: tuple[str, str],
    cause: str,
    where: str,
) -> None:
    """Raises `Violation` if a number differs, relatively, from the one expected. `occasions`: when
    it is the one, and when the other."""
    if actual != pytest.approx(expected, rel=tolerance, abs=1e-9):
        finding = f"is {actual:.6g} {occasions[0]}, {expected:.6g} {occasions[1]}"
        raise Violation(f"{name} {finding}", cause, where)
