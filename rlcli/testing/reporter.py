"""Turns pytest's reports of cases into those of checks, and passes these on in order."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest

from rlcli.testing.failures import failure_of
from rlcli.testing.progress import Case, SubjectProgress
from rlcli.testing.results import Check, CheckFailure, Examined, Watcher
from rlcli.testing.selection import CheckSelection
from rlcli.testing.subjects import Subject


class Reporter:
    """Collects the results of each component. Reports of a component's cases may come in any order;
    its checks are reported in that in which they were collected."""

    def __init__(self, selection: CheckSelection, watcher: Watcher):
        self._selection = selection
        self._watcher = watcher
        self._progress = {subject: SubjectProgress(subject) for subject in selection.subjects}
        self._current: SubjectProgress | None = None
        self._begun: Case | None = None
        """The case that has begun last."""
        self._since = time.monotonic()
        """Start time of the current component; the first one's includes loading what all of them
        need."""
        self.was_interrupted = False
        self.internal_error: BaseException | None = None

    def tested(self) -> list[Examined]:
        return [progress.tested() for progress in self._progress.values()]

    def limited(self, words: str, seconds: float) -> None:
        self._watcher.limited(words, seconds)

    def waits_for(self, nodeid: str, seconds: float) -> None:
        """Another process runs this item, for `seconds` seconds more at most."""
        if nodeid:
            self.pytest_runtest_logstart(nodeid)
        self._watcher.limited(self._running_words(), seconds)

    # -- a component -------------------------------------------------------------------------------

    def open(self, subject: Subject) -> None:
        """The checks of a component begin."""
        self._current = self._progress[subject]
        self._announce(self._current)

    def close(self, left: str) -> None:
        """The checks of the component have ended; `left` names what they have left running."""
        assert self._current is not None
        self._report(self._current.rest())
        if left:
            failure = CheckFailure(f"left running: {left}", "end what was started")
            check = Check("nothing that was started is left running", "FAIL", "", 0.0, failure)
            self._current.checks.append(check)
            self._report([check])
        now = time.monotonic()
        self._current.seconds, self._since = now - self._since, now
        self._watcher.done(self._current.tested())
        self._current = None

    def _announce(self, progress: SubjectProgress) -> None:
        """The number of a component's checks, and those that have ended before it began."""
        self._watcher.component(progress.subject, progress.count_checks())
        self._report(progress.checks)

    def _report(self, checks: Iterable[Check]) -> None:
        for check in checks:
            self._watcher.end(check)

    # -- its cases ---------------------------------------------------------------------------------

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            subject = self._selection.subject_of(item.path)
            self._progress[subject].expect(item)

    def pytest_exception_interact(
        self,
        node: pytest.Item | pytest.Collector,
        call: pytest.CallInfo[Any],
        report: pytest.CollectReport,
    ) -> None:
        """A test file that cannot be read is a failed check of its component."""
        is_ours = not isinstance(node, pytest.Item) and self._selection.has(node.path)
        if not is_ours or call.excinfo is None:
            return
        error = call.excinfo.value.__cause__ or call.excinfo.value
        failure = failure_of(
            pytest.ExceptionInfo.from_exception(error), [node.path], str(report.longrepr)
        )
        content = "contract" if self._selection.is_suite(node.path) else "tests"
        check = Check(f"its {content} can be imported", "FAIL", node.nodeid, 0.0, failure)
        self._progress[self._selection.subject_of(node.path)].checks.append(check)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        case = self._case(nodeid)
        if self._begun is None or self._begun.check != case.check:
            self._watcher.begin(case.words)
        self._begun = case

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._case(report.nodeid).take(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        assert self._current is not None
        self._case(nodeid).has_ended = True
        self._report(self._current.ended())

    def _case(self, nodeid: str) -> Case:
        assert self._current is not None
        return self._current.cases[nodeid]

    def _running_words(self) -> str:
        """The check that has begun last, if it is still running."""
        return self._begun.words if self._begun is not None and not self._begun.has_ended else ""

    # -- the end -----------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self.was_interrupted:
            self._watcher.interrupted(self._running_words())
            return
        for progress in self._progress.values():
            if progress.checks and not progress.cases:  # it has nothing but an unreadable file
                self._announce(progress)
                self._watcher.done(progress.tested())

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.was_interrupted = excinfo.errisinstance(KeyboardInterrupt)

    def pytest_internalerror(
        self, excrepr: object, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> bool:
        """Raise it ourselves: the watcher may be unable to print,
        and pytest would write a report about it."""
        self.internal_error = excinfo.value
        return True
