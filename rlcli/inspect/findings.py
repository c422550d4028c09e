"""Results of checks: lines of ok, warn, FAIL and skip,
each with its cause and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rlcli.errors import RlcliError

Level = Literal["ok", "warn", "FAIL", "skip"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of a report."""

    level: Level
    about: str
    """What was checked, in a word or two."""
    says: str
    """What was found."""
    details: Sequence[str] = ()
    """The cause, examples with their file and line."""
    fix: str | None = None
    """What to do about it."""
    code: str | None = None
    """The fault's stable id."""
    exit_code: int = 0
    """For a FAIL: the command's exit code."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Numbers behind the text, for programs."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"details": list(self.details)}


NO_TORCH = "torch is not installed"


def failure(about: str, error: RlcliError) -> Finding:
    """An error as a line; a skipped check if it comes from importing torch, which is missing."""
    if needs_torch(error):
        return Finding(level="skip", about=about, says=NO_TORCH)
    where = (error.where,) if error.where else ()
    return Finding(
        level="FAIL",
        about=about,
        says=error.what.rstrip("."),
        details=where,
        fix=error.hint,
        code=error.code,
        exit_code=error.exit_code,
    )


def needs_torch(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is an import of torch where it is not installed."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return True
        error = error.__cause__
    return False


def without_torch(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings, with one line at the end for all checks that were skipped without torch."""
    skipped: list[str] = []
    for finding in findings:
        if finding.level == "skip" and finding.says == NO_TORCH:
            skipped.append(finding.about)
        else:
            yield finding
    if skipped:
        checks = ", ".join(dict.fromkeys(skipped))
        yield Finding(
            level="skip",
            about="torch",
            says=f"{NO_TORCH}; not checked without it: {checks}",
            fix="pip install torch",
        )


def as_error(finding: Finding, way_out: str) -> RlcliError:
    """A failure as an error, for a command that then stops; `way_out`: how it could continue."""
    message = ": ".join(filter(None, [finding.about, finding.says, ", ".join(finding.details)]))
    error = RlcliError(
        message, hint="; ".join(filter(None, [finding.fix, way_out])), code=finding.code
    )
    error.exit_code = finding.exit_code
    return error


def exit_code(findings: Iterable[Finding]) -> int:
    """The exit code of the first failure, 0 if there is none."""
    return next((finding.exit_code for finding in findings if finding.level == "FAIL"), 0)


def quantile(ordered: Sequence[int], fraction: float) -> int:
    """The smallest of some ordered numbers that this fraction of them do not exceed."""
    return ordered[max(math.ceil(fraction * len(ordered)) - 1, 0)]


def share(count: int, total: int) -> str:
    """As a percentage with as many digits as it needs."""
    percent = 100 * count / max(total, 1)
    return f"{percent:.1f} %" if 0 < percent < 10 or 90 < percent < 100 else f"{percent:.0f} %"
