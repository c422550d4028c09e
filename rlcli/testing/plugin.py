"""The pytest plugins behind `rlcli test`: the checks of each component are selected, run one
component after the other, and observed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import pytest

from rlcli.project import PACKAGE, search_path
from rlcli.recipe.parsing.finding import shown
from rlcli.testing.contract import TimeIsUp, Violation
from rlcli.testing.failures import failure_of
from rlcli.testing.process_state import PUT_BACK, ProcessState, StartedTasks
from rlcli.testing.progress import CHECK_FAILURE
from rlcli.testing.reporter import Reporter
from rlcli.testing.results import CheckFailure, Watcher
from rlcli.testing.second_process import run_items
from rlcli.testing.selection import CheckSelection, tested_contract, words_of
from rlcli.testing.subjects import COMPONENTS, Subject
from rlcli.testing.time_limit import time_limit, with_line_numbers

NO_SKIP = "raise an error that says what is missing"


class ComponentLoop:
    """Selects the checks, and runs those of one component after the other."""

    def __init__(self, selection: CheckSelection, reporter: Reporter, check_seconds: float):
        self._selection = selection
        self._reporter = reporter
        self._check_seconds = check_seconds
        self._running = StartedTasks.now()
        """What ran before the current component."""

    def pytest_pycollect_makemodule(
        self, module_path: Path, parent: pytest.Collector
    ) -> pytest.Module | None:
        """Assign a unique id: pytest gives all files outside its root the same one."""
        nodeid = shown(module_path)
        if self._selection.is_suite(module_path):
            subject = self._selection.subject_of(module_path)
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
        order = list(self._selection.subjects)
        items.sort(key=lambda item: order.index(self._subject(item)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for subject, items in groupby(session.items, key=self._subject):
            self._reporter.open(subject)
            try:
                left = run_items(session, list(items), self._reporter, self._check_seconds)
            except session.Failed:
                self._close("")
                raise
            self._close(left)
        return True

    def _close(self, left: str) -> None:
        """End the current component; `left` names what a second process has left running."""
        self._reporter.limited("looking for what is left running", self._check_seconds)
        left_here = StartedTasks.now().left_since(self._running)
        self._running = StartedTasks.now()
        self._reporter.close(", ".join(filter(None, [left_here, left])))

    def _subject(self, item: pytest.Item) -> Subject:
        return self._selection.subject_of(item.path)


class CheckObserver:
    """Gives each check a time limit, finds what it changes for the whole process, and adds to its
    report why it failed."""

    def __init__(self, selection: CheckSelection, watcher: Watcher, check_seconds: float):
        self._selection = selection
        self._watcher = watcher
        self._check_seconds = check_seconds
        self._state = ProcessState.now()
        """Before the current check."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.excinfo is not None:
            call.excinfo = self._as_reported(item, call.excinfo)
        report = yield
        if report.failed:
            vars(report)[CHECK_FAILURE] = asdict(self._failure(item, call, report))
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
        contract = tested_contract(item, self._subject(item))
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
        subject = self._subject(item)
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
        subject = self._subject(item)
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

    def _subject(self, item: pytest.Item) -> Subject:
        return self._selection.subject_of(item.path)
