"""Records of what is left of something, by file: `12 rlcli/x.py`. Numbers only go down."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

HOME = Path(__file__).parents[2]
FOLDERS = ("rlcli", "interfaces", "backends", "datasets", "tests")
AS_OTHERS_WRITE = HOME / "tests/mutants/unusual"
"""Correct components in the ways in which users write them."""


def python_files() -> list[Path]:
    files = [file for folder in FOLDERS for file in sorted((HOME / folder).rglob("*.py"))]
    return [file for file in files if AS_OTHERS_WRITE not in file.parents]


def recorded_counts(record: Path) -> dict[str, int]:
    """The count of each file. A merge keeps the lines of both sides (`.gitattributes`):
    the lower one holds."""
    lines = [line.split() for line in record.read_text(encoding="utf-8").splitlines()]
    return {file: int(count) for count, file in sorted(lines, key=lambda line: -int(line[0]))}


def lower(record: Path, today: Mapping[str, int]) -> None:
    """Write today's counts where they are lower than the recorded ones; files that have none left
    are left out."""
    recorded = recorded_counts(record)
    counts = {file: min(count, today.get(file, 0)) for file, count in recorded.items()}
    lines = [f"{count:4} {file}\n" for file, count in sorted(counts.items()) if count]
    record.write_text("".join(lines), encoding="utf-8")


def too_high(record: Path, today: Mapping[str, int]) -> list[str]:
    """The files whose recorded count is above today's."""
    return [
        f"{file}: {count} recorded, {today.get(file, 0)} today"
        for file, count in recorded_counts(record).items()
        if count > today.get(file, 0)
    ]
