"""Human-readable numbers: sizes, ages, counts."""

from __future__ import annotations

SIZES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
AGES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
Units = tuple[tuple[str, int], ...]


def size(number: int, units: Units = SIZES) -> str:
    """A number of bytes, in the largest of the units that it reaches: `3.7 GiB`."""
    unit, scale = _largest_reached(number, units)
    digits = ".3g" if number < 999.5 * scale else ".0f"  # not 1e+03
    return f"{number / scale:{digits}} {unit}"


def age(seconds: float) -> str:
    """`5 min`."""
    unit, scale = _largest_reached(seconds, AGES)
    return f"{max(0, seconds) / scale:.0f} {unit}"


def _largest_reached(number: float, units: Units) -> tuple[str, int]:
    return next(((unit, scale) for unit, scale in units if number >= scale), units[-1])


def count(number: int, noun: str, ending: str = "s") -> str:
    """`1 file`, `2 files`, `2 processes`."""
    return f"{number} {_in_number(number, noun, ending)}"


def grouped_count(number: int, noun: str) -> str:
    """`1 row`, `12 340 rows`."""
    return f"{grouped(number)} {_in_number(number, noun, 's')}"


def grouped(number: int) -> str:
    """Digits in groups of three: `12 340`."""
    return f"{number:,}".replace(",", " ")


def _in_number(number: int, noun: str, ending: str) -> str:
    return noun if number == 1 else f"{noun}{ending}"
