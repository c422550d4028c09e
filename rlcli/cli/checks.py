"""The report of `rlcli test`: each check in words once it is done, and the number, cause and line
of each failure."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rlcli.cli.output import print_styled, print_talk, terminal_width, wrapped
from rlcli.cli.watched_fork import report_stage
from rlcli.errors import escape_control
from rlcli.observe.status_line import can_redraw
from rlcli.observe.terminal import one_line
from rlcli.units import count

if TYPE_CHECKING:
    from rlcli.testing.results import Check, CheckFailure, Examined, Outcome
    from rlcli.testing.subjects import Subject

STYLES = {"ok": "green", "FAIL": "bold red", "skip": "dim"}
COUNTED: dict[Outcome, str] = {"ok": "passed", "FAIL": "failed", "skip": "skipped"}
NOT_TRIED = "not tried: "
"""Prefix of the reason for skipping a check that does concern the component:
something failed before it."""
MOST_REASONS = 3
"""Reasons for skipping checks that are printed, the most frequent ones."""
MARGIN = 8
"""Columns before the text of a check."""


class SilentPrinter:
    """Shows the check in progress on a terminal, and nothing else."""

    def __init__(self) -> None:
        self._is_live = can_redraw(sys.stderr)
        self._title = ""
        self._done = self._checks = 0

    def __enter__(self) -> Self:
        self._live("loading …")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clear()

    def limited(self, words: str, seconds: float) -> None:
        report_stage(f"{self._title}: {words}" if self._title else words, seconds)

    def component(self, subject: Subject, checks: int) -> None:
        self._title, self._done, self._checks = subject.title, 0, checks

    def begin(self, words: str) -> None:
        self._live(f"{self._title} {self._done + 1}/{self._checks} {words}")

    def end(self, check: Check) -> None:
        self._done += 1

    def done(self, tested: Examined) -> None:
        self._clear()

    def interrupted(self, words: str) -> None:
        self._clear()
        during = f" during: {words}" if words else ""
        print_talk(
            f"interrupted{during}; {self._done} of {self._checks} checks of {self._title} were done"
        )

    def total(self, tested: Sequence[Examined]) -> None:
        """Print the total after the last component."""

    def _live(self, text: str) -> None:
        """Print a line that the next one replaces."""
        if self._is_live:
            self._write(f"\r\x1b[2K\x1b[2m{one_line(text)[: terminal_width() - 1]}\x1b[0m")

    def _clear(self) -> None:
        if self._is_live:
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            self._is_live = False


class CheckPrinter(SilentPrinter):
    """Prints each check of a contract when it is done, and each own test that fails; of those that
    pass, their number in each file. Checks that do not concern a component are summarised."""

    def __init__(self, traceback: bool = False):
        super().__init__()
        self._traceback = traceback
        self._skipped: dict[str, int] = {}
        self._variant = ""
        self._last: CheckFailure | None = None
        """The last printed failure: a component that is broken outright fails every check in the
        same way."""
        self._repeated = 0
        """Number of checks since then that failed in the same way."""
        self._own_file, self._own_passed = "", 0
        """The file of the own tests that have passed last, and their number."""

    def component(self, subject: Subject, checks: int) -> None:
        from rlcli.recipe.parsing.finding import shown
        from rlcli.testing.subjects import KINDS

        super().component(subject, checks)
        self._skipped, self._last, self._variant, self._repeated = {}, None, "", 0
        self._own_file, self._own_passed = "", 0
        self._clear()
        file = shown(subject.file)
        print_styled(
            (subject.title, "bold"),
            (f" ({file}) · {count(checks, 'check')} · {KINDS[subject.kind].runs_on}", ""),
        )
        print_styled()

    def end(self, check: Check) -> None:
        super().end(check)
        self._clear()
        if check.outcome == "skip":
            self._skipped[check.reason] = self._skipped.get(check.reason, 0) + 1
            return
        if check.own_file != self._own_file or check.outcome == "FAIL":
            self._say_passed()
        if check.variant != self._variant:
            self._variant = check.variant
            print_styled((f"  with {check.variant}" if check.variant else "  its own tests", "dim"))
        if (
            check.failure is not None
            and self._last is not None
            and _is_alike(check.failure, self._last)
        ):
            self._repeated += 1
            return
        self._say_repeated()
        if check.own_file and check.failure is None:
            self._own_file = check.own_file
            self._own_passed += 1
            return
        _print_line(check.outcome, check.words + _cases(check), check.note)
        if check.failure is not None:
            self._last = check.failure
            for text in (check.failure.finding, check.failure.cause, check.failure.where):
                _print_below(text)
            if self._traceback:
                for line in escape_control(check.failure.traceback).splitlines():
                    print_styled((f"          {line}", "dim"))

    def done(self, tested: Examined) -> None:
        super().done(tested)
        if (error := tested.broken) is not None:
            title = (tested.subject.title, "bold")
            if tested.lacks_library:
                print_styled(title, (" is skipped", "dim"))
                _print_below(f"{error.what}: {error.hint}")
            else:
                print_styled(title, (" cannot be loaded", "red"))
                _print_below(str(error))
            print_styled()
            return
        self._say_repeated()
        self._say_passed()
        for line in _skipped(self._skipped):
            _print_line("skip", line)
        print_styled((summary([tested]), "bold red" if tested.count("FAIL") else "bold green"))

    def _say_repeated(self) -> None:
        if self._repeated:
            note = (
                "1 more check fails"
                if self._repeated == 1
                else f"{self._repeated} more checks fail"
            )
            _print_line("FAIL", f"{note} for this reason")
        self._repeated = 0

    def _say_passed(self) -> None:
        if self._own_passed:
            _print_line("ok", f"{self._own_file}: {count(self._own_passed, 'test')}")
        self._own_passed = 0

    def total(self, tested: Sequence[Examined]) -> None:
        if len(tested) > 1:
            tried = [component for component in tested if not component.lacks_library]
            sound = sum(component.is_sound for component in tried)
            print_talk(
                f"{sound} of {len(tried)} components fulfil their contracts: {summary(tried)}"
            )


def _is_alike(failure: CheckFailure, previous: CheckFailure) -> bool:
    """Whether two failures are the same, or the same exception at the same line: messages may
    contain batch sizes."""
    if failure == previous:
        return True
    crashed = failure.cause == previous.cause == ""
    exception, exception_before = (
        failure.finding.partition(":")[0],
        previous.finding.partition(":")[0],
    )
    return crashed and exception == exception_before and failure.where == previous.where != ""


def summary(tested: Sequence[Examined]) -> str:
    """`13 passed, 1 failed, 2 skipped in 9.2 s`."""
    outcomes = [check.outcome for component in tested for check in component.checks]
    numbers = {word: outcomes.count(outcome) for outcome, word in COUNTED.items()}
    words = (
        ", ".join(f"{number} {word}" for word, number in numbers.items() if number) or "no checks"
    )
    return f"{words} in {sum(component.seconds for component in tested):.1f} s"


def _skipped(reasons: Mapping[str, int]) -> Iterator[str]:
    """`17 that do not concern it: has no inference (16); does not evaluate (1)`, and separately
    those that might, of which all reasons are given."""
    blocked = {
        reason.removeprefix(NOT_TRIED): of
        for reason, of in reasons.items()
        if reason.startswith(NOT_TRIED)
    }
    others = {reason: of for reason, of in reasons.items() if not reason.startswith(NOT_TRIED)}
    if number := sum(others.values()):
        words = "that does not" if number == 1 else "that do not"
        yield f"{number} {words} concern it: {_with_counts(others, MOST_REASONS)}"
    if number := sum(blocked.values()):
        yield f"{number} that could not be tried: {_with_counts(blocked, len(blocked))}"


def _with_counts(reasons: Mapping[str, int], most: int) -> str:
    """The most frequent reasons, each with its number."""
    shown = sorted(reasons.items(), key=lambda entry: -entry[1])[:most]
    words = [f"{reason} ({of})" if len(reasons) > 1 else reason for reason, of in shown]
    if rest := len(reasons) - len(shown):
        words.append(f"{count(rest, 'other reason')}, which --json lists")
    return "; ".join(words)


def _cases(check: Check) -> str:
    """Which of several cases failed: ` (3 of 5: 2, 3, 5)`."""
    if check.cases == 1 or not check.failed_cases:
        return ""
    shown = ", ".join(check.failed_cases[:3]) + (", …" if len(check.failed_cases) > 3 else "")
    return f" ({len(check.failed_cases)} of {check.cases}: {shown})"


def _print_line(level: str, words: str, note: str = "") -> None:
    """`  ok    the same on 1 and 2 ranks   max diff 3e-7`; a note that does not fit goes below."""
    style = STYLES[level] if level == "skip" else ""
    first, *rest = _wrapped(one_line(words), MARGIN)
    beside = f"   {one_line(note)}" if note and not rest else ""
    if MARGIN + len(first) + len(beside) > terminal_width():
        beside = ""
    print_styled((f"  {level:<{MARGIN - 2}}", STYLES[level]), (first, style), (beside, "dim"))
    for line in rest:
        print_styled((" " * MARGIN + line, style))
    if note and not beside:
        _print_below(note)


def _print_below(text: str) -> None:
    """Print text that belongs to the line above."""
    for paragraph in escape_control(text).splitlines():
        for line in _wrapped(paragraph, MARGIN + 2):
            print_styled((" " * (MARGIN + 2) + line, ""))


def _wrapped(text: str, margin: int) -> list[str]:
    return wrapped(text, width=max(terminal_width() - margin, 40)).split("\n")
