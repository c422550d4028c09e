"""Texts of any origin, made fit for one line of a report."""

from __future__ import annotations

from rlcli.errors import escape_control


def shortened(text: str, width: int) -> str:
    """Line breaks as ⏎, control characters escaped, the middle left out if it is too long."""
    line = escape_control(text.replace("\n", "⏎"))
    if len(line) <= width:
        return line
    head = (width - 1) // 2
    return f"{line[:head]}…{line[len(line) - (width - 1 - head) :]}"
