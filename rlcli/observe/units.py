"""Human-readable numbers: sizes, ages, counts."""

from __future__ import annotations

SIZES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
AGES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def size(number: int) -> str:
    """A number of bytes: `3.7 GiB`."""
    unit, scale = next(((unit, scale) for unit, scale in SIZES if number >= scale), ("bytes", 1))
    digits = ".3g" if number < 999.5 * scale else ".0f"  # not 1e+03
    return f"{number / scale:{digits}} {unit}"


def age(seconds: float) -> str:
    """`5 min`."""
    unit, scale = next(((unit, scale) for unit, scale in AGES if seconds >= scale), AGES[-1])
    return f"{max(0, seconds) / scale:.0f} {unit}"


def count(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
