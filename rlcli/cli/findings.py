"""Prints the findings of a check, aligned to the terminal's width."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcli.cli.output import print_text, terminal_width, wrapped
from rlcli.units import count

if TYPE_CHECKING:
    from rlcli.inspect.findings import Finding

LEVEL_WIDTH = 6


def print_findings(findings: Sequence[Finding]) -> None:
    """Print one line each, with its cause and fix below,
    then the number of failures and warnings."""
    about_width = max((len(finding.about) for finding in findings), default=0) + 2
    for finding in findings:
        for line in finding_lines(finding, about_width, terminal_width()):
            print_text(line)
    print_text(summary(findings))


def finding_lines(finding: Finding, about_width: int, width: int) -> list[str]:
    """A finding in lines of at most `width` columns, unless a word is longer."""
    margin = LEVEL_WIDTH + about_width
    head = f"{finding.level:<{LEVEL_WIDTH}}{finding.about:<{about_width}}"
    lines = _wrapped(finding.says, head, " " * margin, width)
    inner = " " * (LEVEL_WIDTH + 2)
    for detail in finding.details:
        lines += _wrapped(detail, inner, inner + "  ", width)
    if finding.fix:
        lines += _wrapped(f"fix: {finding.fix}", inner, inner + "  ", width)
    return lines


def _wrapped(text: str, first: str, rest: str, width: int) -> list[str]:
    whole_numbers = re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "\0", text)
    return wrapped(whole_numbers, first, rest, max(width, 40)).replace("\0", " ").split("\n")


def summary(findings: Sequence[Finding]) -> str:
    """`1 failure, 2 warnings`."""
    failures = sum(finding.level == "FAIL" for finding in findings)
    warnings = sum(finding.level == "warn" for finding in findings)
    words = [
        count(number, word)
        for number, word in ((failures, "failure"), (warnings, "warning"))
        if number
    ]
    return ", ".join(words) or "no problems found"
