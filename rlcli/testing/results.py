"""The results of a component's checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlcli.errors import ResourceError, RlcliError
from rlcli.testing.subjects import Subject

Outcome = Literal["ok", "FAIL", "skip"]


@dataclass(frozen=True)
class CheckFailure:
    """Why a check failed, where that is known."""

    finding: str
    """What was observed, with its number."""
    cause: str = ""
    where: str = ""
    """`file:line`, relative to the working directory."""
    traceback: str = field(default="", compare=False)


@dataclass(frozen=True)
class Check:
    """One check of a component, over all cases (parameters) that it was run with."""

    words: str
    outcome: Outcome
    test: str
    """pytest's name for it."""
    seconds: float
    failure: CheckFailure | None = None
    """The failure of the first case that failed."""
    failed_cases: tuple[str, ...] = ()
    """Names of the cases that failed; empty for a check without parameters."""
    cases: int = 1
    reason: str = ""
    """Why it was skipped."""
    note: str = ""
    """What a passing check reports, such as a largest difference: `record_property("note", …)`."""
    variant: str = ""
    """The component's arguments, if its tests run the contract with several sets of them."""
    own_file: str = ""
    """The test file of the project that it is from; empty for a check of a contract."""

    def as_json(self) -> dict[str, Any]:
        failure = self.failure or CheckFailure("")
        return {
            "check": self.words,
            "variant": self.variant or None,
            "outcome": {"ok": "passed", "FAIL": "failed", "skip": "skipped"}[self.outcome],
            "found": failure.finding or None,
            "cause": failure.cause or None,
            "where": failure.where or None,
            "cases": self.cases,
            "failed_cases": list(self.failed_cases),
            "reason": self.reason or None,
            "note": self.note or None,
            "seconds": round(self.seconds, 3),
            "test": self.test,
        }


@dataclass(frozen=True)
class Examined:
    """A component after its checks."""

    subject: Subject
    checks: tuple[Check, ...] = ()
    seconds: float = 0.0
    broken: RlcliError | None = None
    """Why its file could not be loaded."""

    @property
    def lacks_library(self) -> bool:
        """Whether it was left out because a library that it requires is not installed."""
        return isinstance(self.broken, ResourceError)

    @property
    def is_sound(self) -> bool:
        return (self.broken is None or self.lacks_library) and not self.count("FAIL")

    def count(self, outcome: Outcome) -> int:
        return sum(check.outcome == outcome for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.subject.kind,
            "name": self.subject.name,
            "file": str(self.subject.file),
            "ok": self.is_sound,
            "passed": self.count("ok"),
            "failed": self.count("FAIL"),
            "skipped": self.count("skip"),
            "seconds": round(self.seconds, 3),
            "broken": None if self.broken is None else str(self.broken),
            "checks": [check.as_json() for check in self.checks],
        }


def exit_code(tested: Sequence[Examined]) -> int:
    """1 if a check failed, else the exit code of a file that could not be loaded, else 0."""
    if any(examined.count("FAIL") for examined in tested):
        return 1
    errors = [examined.broken for examined in tested if not examined.is_sound]
    return next((error.exit_code for error in errors if error is not None), 0)


class Watcher(Protocol):
    """Is notified of events while checks run."""

    def limited(self, words: str, seconds: float) -> None:
        """From now on the runner does what `words` say, for at most `seconds` seconds."""

    def component(self, subject: Subject, checks: int) -> None:
        """The checks of a component begin; `checks` is their number."""

    def begin(self, words: str) -> None:
        """A check begins."""

    def end(self, check: Check) -> None:
        """A check is done."""

    def done(self, tested: Examined) -> None:
        """A component is done, or could not be loaded."""

    def interrupted(self, words: str) -> None:
        """Ctrl-C, during the check with this description; no further events follow."""
