"""The profile of some steps of a run: traces, and a table of what their calls computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from rlcli.files import known_object
from rlcli.observe.series import short
from rlcli.observe.terminal import one_line

PROFILE = "profile"
"""Folder of a run."""


@dataclass(frozen=True)
class ProfiledCall:
    """A call of a step."""

    step: int
    call: str
    seconds: float
    """Of the slowest rank."""
    operations: float
    """Floating-point operations of all ranks; 0 if they are not known."""
    mfu: float | None
    """Their share of what the devices of the ranks could have computed in that time."""


def trace_file(run: Path, step: int, rank: int) -> Path:
    return run / PROFILE / f"step{step}-rank{rank}.json"


def described(step: int, calls: Sequence[ProfiledCall]) -> tuple[str, str]:
    """The name and the content of the file that describes the calls of a profiled step."""
    return f"{PROFILE}/step{step}-calls.json", json.dumps({"calls": [asdict(c) for c in calls]})


def read_calls(run: Path) -> list[ProfiledCall]:
    """The calls of all profiled steps, in order; files that are not usable are left out."""
    entries: list[Any] = []
    for file in sorted((run / PROFILE).glob("step*-calls.json")):
        entries += known_object(file).get("calls") or []
    calls = [ProfiledCall(**entry) for entry in entries if isinstance(entry, dict)]
    return sorted(calls, key=lambda call: call.step)


def traces(run: Path) -> list[Path]:
    return sorted((run / PROFILE).glob("step*-rank*.json"))


def profile_table(calls: Sequence[ProfiledCall], fancy: bool) -> Table:
    unit, size = _unit(calls)
    table = Table(box=box.SIMPLE_HEAD if fancy else None, pad_edge=False, padding=(0, 2))
    table.add_column("step", justify="right")
    table.add_column("call", overflow="fold")
    for heading in ("seconds", unit, f"{unit}/s", "of the peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    for call in calls:
        cells = [str(call.step), one_line(call.call), short(call.seconds)]
        operations = call.operations / size
        cells.append(short(operations) if operations else "-")
        cells.append(short(operations / call.seconds) if operations else "-")
        cells.append(f"{call.mfu:.1%}" if call.mfu is not None else "-")
        table.add_row(*cells)
    return table


def _unit(calls: Sequence[ProfiledCall]) -> tuple[str, float]:
    """What operations are counted in, and how many that is."""
    fastest = max((call.operations / call.seconds for call in calls), default=0.0)
    return ("TFLOP", 1e12) if fastest >= 1e12 else ("GFLOP", 1e9)
