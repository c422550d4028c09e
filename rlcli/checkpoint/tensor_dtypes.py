"""Numbers of safetensors files without torch: their types, and conversions between them.

Values are handled as raw bits, because numpy has no bfloat16. Rounding is to the nearest, ties to
even: the resulting bits are the same as torch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlcli.api.weight_files import BYTES
from rlcli.errors import ModelError

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types that can be converted into each other."""

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
"""Name in torch and in config.json → name in a safetensors header."""

Raw = np.ndarray[Any, np.dtype[Any]]
"""Bits of numbers as unsigned integers of their size."""


def raw_type(dtype: str) -> np.dtype[Any]:
    """The unsigned integer that holds the bits of a number."""
    return np.dtype(f"<u{BYTES[dtype]}")


def cast(raw: Raw, dtype: str, target: str, name: str) -> Raw:
    """The bits of the same numbers in another type. Raises ModelError for a number outside its
    range.

    Both types are in `FLOATS`; `name` is the tensor's, for the message.
    """
    if dtype == target:
        return raw
    with np.errstate(over="ignore", invalid="ignore"):
        values = _as_numbers(raw, dtype)
        converted = _from_float32(values.astype(np.float32, copy=False), target)
    if not is_finite(converted, target) and is_finite(raw, dtype):
        raise ModelError(
            f"{name} holds {np.abs(values).max():.4g}, which is too large for the requested type",
            hint="--dtype bfloat16 has the range of float32",
        )
    return converted


def is_finite(raw: Raw, dtype: str) -> bool:
    """Whether there is neither a NaN nor an infinity;
    always true for a type that is not in `FLOATS`."""
    if dtype == "BF16":
        return not bool(((raw & 0x7F80) == 0x7F80).any())
    return dtype not in FLOATS or bool(np.isfinite(_as_numbers(raw, dtype)).all())


def _as_numbers(raw: Raw, dtype: str) -> Raw:
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.view(f"<f{BYTES[dtype]}")


def _from_float32(values: Raw, target: str) -> Raw:
    if target != "BF16":
        return np.ascontiguousarray(values.astype(f"<f{BYTES[target]}")).view(raw_type(target))
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    if np.isnan(values).any():
        rounded = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
    return rounded.astype(np.uint16)
