"""The pytest plugin behind `rlcli test`: runs the selected checks of each component under
observation, and collects their results."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcli.project import PACKAGE, search_path
from rlcli.recipe.parsing.layers import shown
from rlcli.testing.contract import TimeIsUp, Violation
from rlcli.testing.failures import failure_of
from rlcli.testing.process_state import PUT_BACK, ProcessState, StartedTasks
from rlcli.testing.progress import Case, SubjectProgress
from rlcli.testing.results import Check, CheckFailure, Examined, Watcher
from rlcli.testing.selection import CheckSelection, tested_contract, words_of
from rlcli.testing.subjects import COMPONENTS, Subject
from rlcli.testing.time_limit import time_limit, with_line_numbers

NO_SKIP = "raise an error that says what is missing"


class ChecksPlugin:
    """Runs each check with a time limit, and reports on it and on its component."""

    def __init__(self, selection: CheckSelection, watcher: Watcher, check_seconds: float):
        self._selection = selection
        self._watcher = watcher
        self._check_seconds = check_seconds
        self._progress = {subject: SubjectProgress(subject) for subject in selection.subjects}
        self._open: list[Case] = []
        """Cases of the current check."""
        self._current: SubjectProgress | None = None
        self._running = StartedTasks.now()
        """What ran before the current component."""
        self._state = ProcessState.now()
        """Before the current check."""
        self._since = time.monotonic()
        """Start time of the current component; the first one's includes loading what all of them
        need."""
        self.was_interrupted = False
        self.internal_error: BaseException | None = None

    def tested(self) -> list[Examined]:
        return [progress.tested() for progress in self._progress.values()]

    # -- which checks there are --------------------------------------------------------------------

    def pytest_pycollect_makemodule(
        self, module_path: Path, parent: pytest.Collector
    ) -> pytest.Module | None:
        """Assign a unique id: pytest gives all files outside its root the same one."""
        nodeid = shown(module_path)
        if self._selection.is_suite(module_path):
            subject = self._subject(module_path)
            nodeid = f"{subject.kind}/{subject.name}"
        return pytest.Module.from_parent(parent, path=module_path, nodeid=nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, None, None]:
        chosen = dict.fromkeys(self._selection.choose(items))
        dropped = [item for item in items if item not in chosen]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
        items[:] = chosen
        yield
        # pytest has grouped items that share a fixture, across components
        order = list(self._progress)
        items.sort(key=lambda item: order.index(self._subject(item.path)))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._progress[self._subject(item.path)].cases[item.nodeid] = Case(item)

    def pytest_exception_interact(
        self,
        node: pytest.Item | pytest.Collector,
        call: pytest.CallInfo[Any],
        report: pytest.CollectReport,
    ) -> None:
        """A test file that cannot be read is a failed check of its component."""
        subject = self._selection.subject_of(node.path)
        if isinstance(node, pytest.Item) or subject is None or call.excinfo is None:
            return
        error = call.excinfo.value.__cause__ or call.excinfo.value
        failure = failure_of(
            pytest.ExceptionInfo.from_exception(error), [node.path], str(report.longrepr)
        )
        content = "contract" if self._selection.is_suite(node.path) else "tests"
        check = Check(f"its {content} can be imported", "FAIL", node.nodeid, 0.0, failure)
        self._progress[subject].checks.append(check)

    def _subject(self, file: Path) -> Subject:
        subject = self._selection.subject_of(file)
        assert subject is not None
        return subject

    # -- what becomes of them ----------------------------------------------------------------------

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        progress, case = self._find(nodeid)
        if self._open and self._open[0].check != case.check:
            self._close_check()
        if self._current is not progress:
            self._close_component()
            self._current = progress
            self._announce(progress)
        if not self._open:
            self._watcher.begin(words_of(case.item))
        self._open.append(case)

    def _announce(self, progress: SubjectProgress) -> None:
        """The number of a component's checks, and those that have ended before it began."""
        checks = {upcoming.check for upcoming in progress.cases.values()}
        self._watcher.component(progress.subject, len(checks) + len(progress.checks))
        for check in progress.checks:
            self._watcher.end(check)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.excinfo is not None:
            call.excinfo = self._as_reported(item, call.excinfo)
        report = yield
        _, case = self._find(item.nodeid)
        case.seconds += report.duration
        case.note = next(
            (str(value) for name, value in report.user_properties if name == "note"), ""
        )
        if report.failed and case.failure is None:
            case.outcome = "FAIL"
            case.failure = self._failure(item, call, report)
        elif report.skipped and case.outcome == "ok":
            case.outcome = "skip"
            case.reason = getattr(report, "wasxfail", "") or _reason(report)
        return report

    def _as_reported(
        self, item: pytest.Item, error: pytest.ExceptionInfo[BaseException]
    ) -> pytest.ExceptionInfo[BaseException]:
        """The error that a report can show and counts."""
        if error.errisinstance(TimeIsUp):
            return pytest.ExceptionInfo.from_exception(with_line_numbers(error.value))
        if self._is_skipped_by_component(item, error):
            violation = Violation(f"the component skipped the check: {error.value}", NO_SKIP)
            return pytest.ExceptionInfo.from_exception(violation.with_traceback(error.tb))
        return error

    def _is_skipped_by_component(
        self, item: pytest.Item, error: pytest.ExceptionInfo[BaseException]
    ) -> bool:
        """Whether something else than a contract has called `pytest.skip` during its check."""
        if not error.errisinstance(pytest.skip.Exception):
            return False
        contract = tested_contract(item, self._subject(item.path))
        if contract is None:
            return False
        files = [str(entry.path) for entry in error.traceback]
        caller = [file for file in files if "_pytest" not in file][-1]
        modules = (sys.modules.get(cls.__module__) for cls in contract.__mro__)
        contracts = {getattr(module, "__file__", None) for module in modules}
        return caller not in contracts and not Path(caller).is_relative_to(PACKAGE / "testing")

    def _failure(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> CheckFailure:
        if call.excinfo is None:  # a test that was expected to fail did not
            return CheckFailure(str(report.longrepr))
        subject = self._subject(item.path)
        components = [Path(folder) for kind in COMPONENTS.values() for folder in search_path(kind)]
        files = [subject.file, subject.file.parent, *components, item.path, PACKAGE]
        readable = [file for file in files if not self._selection.is_suite(file)]
        return failure_of(call.excinfo, readable, report.longreprtext)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self._state = ProcessState.now()
        with self._limited(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            with self._limited(item):
                return (yield)
        except Exception:
            self._check_state(item)  # what failed may have failed for that reason
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._limited(item):
            result = yield
        self._check_state(item)
        return result

    def _check_state(self, item: pytest.Item) -> None:
        """Raises Violation if the check of a contract has changed the process; puts it back."""
        subject = self._subject(item.path)
        if tested_contract(item, subject) is None:
            return
        changes = ProcessState.now().changes_since(self._state)
        self._state.restore()
        if changes:
            raise Violation(f"it changes the whole process: {changes}", PUT_BACK, str(subject.file))

    @contextlib.contextmanager
    def _limited(self, item: pytest.Item) -> Iterator[None]:
        self._watcher.limited(words_of(item), self._check_seconds)
        with time_limit(self._check_seconds):
            yield

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if self.was_interrupted:
            self._watcher.interrupted(words_of(self._open[0].item) if self._open else "")
            return
        if self._open:
            self._close_check()
        self._close_component()
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

    def _find(self, nodeid: str) -> tuple[SubjectProgress, Case]:
        progress = next(
            progress for progress in self._progress.values() if nodeid in progress.cases
        )
        return progress, progress.cases[nodeid]

    def _close_check(self) -> None:
        assert self._current is not None
        check = self._current.add(self._open)
        self._open = []
        self._watcher.end(check)

    def _close_component(self) -> None:
        if self._current is not None:
            self._check_nothing_left(self._current)
            now = time.monotonic()
            self._current.seconds, self._since = now - self._since, now
            self._watcher.done(self._current.tested())
            self._current = None

    def _check_nothing_left(self, progress: SubjectProgress) -> None:
        self._watcher.limited("looking for what is left running", self._check_seconds)
        left = StartedTasks.now().left_since(self._running)
        self._running = StartedTasks.now()
        if left:
            failure = CheckFailure(f"left running: {left}", "end what was started")
            check = Check("nothing that was started is left running", "FAIL", "", 0.0, failure)
            progress.checks.append(check)
            self._watcher.end(check)


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
