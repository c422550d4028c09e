"""Logs of a run's processes: one file for each rank, node and server, in `logs/`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlcli.api.run_folder import LOGS


def run_logs(run: Path) -> dict[str, Path]:
    """Name → file: `rank0`, `rank1`, …, `node0`, …, `stacks`; ranks come first."""
    try:
        names = [
            entry.name.removesuffix(".log")
            for entry in os.scandir(run / LOGS)
            if entry.name.endswith(".log")
        ]
    except OSError:
        return {}
    return {name: run / LOGS / f"{name}.log" for name in sorted(names, key=_order)}


def as_text(line: bytes) -> str:
    """A line of a log as text."""
    return line.decode(errors="replace").removesuffix("\r")


def _order(name: str) -> tuple[bool, str, int]:
    head, number = re.fullmatch(r"(.*?)(\d*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    return head != "rank", head, int(number or 0)
