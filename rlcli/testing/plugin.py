"""The pytest plugin behind `rlcli test`: selects the checks of each component and collects their
results."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import threading
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import pytest

from rlcli.api.component import module_name
from rlcli.processes import seconds_in_queue
from rlcli.project import PACKAGE, search_path
from rlcli.recipe.parsing.layers import shown
from rlcli.testing.contract import Contract, TimeIsUp, Violation
from rlcli.testing.failures import failure_of
from rlcli.testing.process_state import ProcessState, StartedTasks
from rlcli.testing.results import Check, CheckFailure, Examined, Outcome, Watcher
from rlcli.testing.subjects import COMPONENTS, KINDS, Subject

PUT_BACK = "restore it, or change it only where that is needed"
"""What a component that changes the whole process should do instead."""
LONG = ("long", "exhaustive")
"""Marks of own tests that run with all layouts only."""
NO_SKIP = "raise an error that says what is missing"


@dataclass
class _Case:
    """One pytest item: a check with one set of parameters."""

    item: pytest.Item
    seconds: float = 0.0
    outcome: Outcome = "ok"
    failure: CheckFailure | None = None
    reason: str = ""
    note: str = ""

    @property
    def contract(self) -> type[Contract] | None:
        cls = getattr(self.item, "cls", None)
        return cls if cls is not None and issubclass(cls, Contract) else None

    @property
    def check(self) -> str:
        """The check that this is a case of."""
        return self.item.nodeid.partition("[")[0]

    @property
    def parameters(self) -> str:
        callspec = getattr(self.item, "callspec", None)
        return callspec.id if callspec is not None else ""


@dataclass
class _Progress:
    """A component while its checks run."""

    subject: Subject
    cases: dict[str, _Case] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0

    def variant(self, case: _Case) -> str:
        """`beta=0.1`, for a component whose tests run the contract with several sets of
        arguments."""
        contracts = {tried.contract for tried in self.cases.values()} - {None}
        if case.contract is None or len(contracts) < 2:
            return ""
        return (
            ", ".join(f"{name}={value}" for name, value in case.contract.args.items())
            or "no arguments"
        )

    def tested(self) -> Examined:
        return Examined(self.subject, tuple(self.checks), self.seconds)


class ChecksPlugin:
    """Observes every check; identifies its component by the file that contains it."""

    def __init__(
        self,
        suites: Mapping[Path, Subject],
        values: Mapping[Subject, Any],
        watcher: Watcher,
        keyword: str,
        check_seconds: float,
        all_layouts: bool,
    ):
        """`suites`: file with a component's contract → the component; `values`: each one's values
        from the command line; `keyword`: words that selected checks must contain, empty for all;
        `all_layouts`: try backends in every layout, and run own tests that may take long."""
        self._suites = suites
        self._values = values
        self._watcher = watcher
        self._keyword = keyword
        self._check_seconds = check_seconds
        self._all_layouts = all_layouts
        self._homes = dict(suites)
        for subject in suites.values():
            for file in subject.own_tests:
                self._homes.setdefault(file, subject)
        self._progress = {subject: _Progress(subject) for subject in suites.values()}
        self._open: list[_Case] = []
        """Cases of the current check."""
        self._current: _Progress | None = None
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
        subject = self._suites.get(module_path)
        nodeid = shown(module_path) if subject is None else f"{subject.kind}/{subject.name}"
        module: pytest.Module = pytest.Module.from_parent(parent, path=module_path, nodeid=nodeid)
        return module

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, None, None]:
        self._leave_out_long(config, items)
        self._choose(config, items)
        yield
        # pytest has grouped items that share a fixture, across components
        order = list(self._progress)
        items.sort(key=lambda item: order.index(self._homes[item.path]))

    def _choose(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """A full contract in a component's own file replaces the default one;
        a part of it does not."""
        of = {
            item: subject for item in items if (subject := self._homes.get(item.path)) is not None
        }
        specified = {
            subject
            for item, subject in of.items()
            if self._is_contract(item, subject, is_own=True)
            and issubclass(item.cls, _contract_of(subject))  # type: ignore[attr-defined]
        }
        dropped = [
            item
            for item in items
            if item not in of
            or self._is_left_out(item, of[item], specified)
            or not answers(item, self._keyword)
        ]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]
        contracts = [item for item in items if self._is_contract(item, of[item])]
        for contract in {item.cls for item in contracts}:  # type: ignore[attr-defined]
            self._give_values(contract)

    def _leave_out_long(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Drop own tests that run with all layouts only."""
        dropped = [item for item in items if self._is_long(item)]
        if dropped and not self._all_layouts:
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item not in dropped]

    def _is_long(self, item: pytest.Item) -> bool:
        """Whether it is marked so or, in a file that only mentions its component, may take longer
        than a check."""
        if any(item.get_closest_marker(mark) is not None for mark in LONG):
            return True
        subject, timeout = self._homes.get(item.path), item.get_closest_marker("timeout")
        if subject is None or timeout is None or item.path == subject.named_tests:
            return False
        return [*timeout.args, timeout.kwargs.get("timeout", 0)][0] > self._check_seconds

    def _is_contract(self, item: pytest.Item, subject: Subject, is_own: bool = False) -> bool:
        cls = getattr(item, "cls", None)
        if cls is None or not issubclass(cls, Contract) or (is_own and item.path in self._suites):
            return False
        kind = KINDS[subject.kind].part_of or subject.kind
        return getattr(cls, "kind", kind) == kind and module_name(cls.name) == module_name(
            subject.name
        )

    def _is_left_out(
        self, item: pytest.Item, subject: Subject, specified: Collection[Subject]
    ) -> bool:
        """Whether a check is replaced by one of the component's own tests, or in these is that of
        another component or of another part of the contract."""
        if item.path in self._suites:
            return subject in specified
        cls = getattr(item, "cls", None)
        if cls is None or not issubclass(cls, Contract):
            return False
        is_of_subject = self._is_contract(item, subject)
        is_of_another = bool(cls.name) and not is_of_subject
        return is_of_another or (is_of_subject and not _is_asked_for(item, subject))

    def _give_values(self, contract: type[Contract]) -> None:
        if self._all_layouts and hasattr(contract, "all_layouts"):
            contract.all_layouts = True
        for subject, values in self._values.items():
            kind = KINDS[subject.kind].part_of or subject.kind
            if (
                values
                and contract.kind == kind
                and module_name(contract.name) == module_name(subject.name)
            ):
                if subject.kind == "recipe":
                    overrides = (*contract.overrides, *values)  # type: ignore[attr-defined]
                    contract.overrides = overrides  # type: ignore[attr-defined]
                else:
                    contract.args = {**contract.args, **values}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._progress[self._homes[item.path]].cases[item.nodeid] = _Case(item)

    def pytest_exception_interact(
        self,
        node: pytest.Item | pytest.Collector,
        call: pytest.CallInfo[Any],
        report: pytest.CollectReport,
    ) -> None:
        """A test file that cannot be read is a failed check of its component."""
        subject = self._homes.get(node.path)
        if isinstance(node, pytest.Item) or subject is None or call.excinfo is None:
            return
        error = call.excinfo.value.__cause__ or call.excinfo.value
        failure = failure_of(
            pytest.ExceptionInfo.from_exception(error), [node.path], str(report.longrepr)
        )
        words = (
            "its tests can be imported"
            if node.path not in self._suites
            else "its contract can be imported"
        )
        self._progress[subject].checks.append(Check(words, "FAIL", node.nodeid, 0.0, failure))

    # -- what becomes of them ----------------------------------------------------------------------

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        progress, case = self._find(nodeid)
        if self._open and self._open[0].check != case.check:
            self._close_check()
        if self._current is not progress:
            self._close_component()
            self._current = progress
            checks = {upcoming.check for upcoming in progress.cases.values()}
            self._watcher.component(progress.subject, len(checks) + len(progress.checks))
            for check in progress.checks:
                self._watcher.end(check)
        if not self._open:
            self._watcher.begin(words_of(case.item))
        self._open.append(case)

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
        if not self._is_contract(item, self._homes[item.path]):
            return False
        files = [str(entry.path) for entry in error.traceback]
        caller = [file for file in files if "_pytest" not in file][-1]
        classes = item.cls.__mro__  # type: ignore[attr-defined]
        modules = (sys.modules.get(cls.__module__) for cls in classes)
        contracts = {getattr(module, "__file__", None) for module in modules}
        return caller not in contracts and not Path(caller).is_relative_to(PACKAGE / "testing")

    def _failure(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> CheckFailure:
        if call.excinfo is None:  # a test that was expected to fail did not
            return CheckFailure(str(report.longrepr))
        subject = self._homes[item.path]
        components = [Path(folder) for kind in COMPONENTS.values() for folder in search_path(kind)]
        files = [subject.file, subject.file.parent, *components, item.path, PACKAGE]
        return failure_of(
            call.excinfo, [file for file in files if file not in self._suites], report.longreprtext
        )

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
        subject = self._homes[item.path]
        if not self._is_contract(item, subject):
            return
        changes = ProcessState.now().changes_since(self._state)
        self._state.restore()
        if changes:
            finding = f"it changes the whole process: {changes}"
            raise Violation(finding, PUT_BACK, str(subject.file))

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
                self._watcher.component(progress.subject, len(progress.checks))
                for check in progress.checks:
                    self._watcher.end(check)
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

    def _find(self, nodeid: str) -> tuple[_Progress, _Case]:
        progress = next(
            progress for progress in self._progress.values() if nodeid in progress.cases
        )
        return progress, progress.cases[nodeid]

    def _close_check(self) -> None:
        assert self._current is not None
        check = _check_of(self._open, self._current.variant(self._open[0]))
        self._open = []
        self._current.checks.append(check)
        self._watcher.end(check)

    def _close_component(self) -> None:
        if self._current is not None:
            self._check_nothing_left(self._current)
            now = time.monotonic()
            self._current.seconds, self._since = now - self._since, now
            self._watcher.done(self._current.tested())
            self._current = None

    def _check_nothing_left(self, progress: _Progress) -> None:
        self._watcher.limited("looking for what is left running", self._check_seconds)
        left = StartedTasks.now().left_since(self._running)
        self._running = StartedTasks.now()
        if left:
            failure = CheckFailure(f"left running: {left}", "end what was started")
            check = Check("nothing that was started is left running", "FAIL", "", 0.0, failure)
            progress.checks.append(check)
            self._watcher.end(check)


def _is_asked_for(item: pytest.Item, subject: Subject) -> bool:
    """Whether a check of a full contract belongs to the part that applies to a subject."""
    name = getattr(item, "originalname", item.name)
    return not KINDS[subject.kind].part_of or hasattr(_contract_of(subject), name)


def _contract_of(subject: Subject) -> type[Contract]:
    kind = KINDS[subject.kind]
    contract: type[Contract] = getattr(importlib.import_module(kind.module), kind.contract)
    return contract


def _check_of(cases: Sequence[_Case], variant: str) -> Check:
    """The combined result of a check's cases."""
    failed = [case for case in cases if case.outcome == "FAIL"]
    outcome: Outcome = (
        "FAIL" if failed else "skip" if all(case.outcome == "skip" for case in cases) else "ok"
    )
    return Check(
        words=words_of(cases[0].item),
        outcome=outcome,
        test=cases[0].check,
        seconds=sum(case.seconds for case in cases),
        failure=failed[0].failure if failed else None,
        failed_cases=tuple(case.parameters for case in failed if case.parameters),
        cases=len(cases),
        reason=cases[0].reason if outcome == "skip" else "",
        note=next((case.note for case in cases if case.note), ""),
        variant=variant,
    )


def answers(item: pytest.Item, keyword: str) -> bool:
    """Whether a check contains these words, in the report or in its name;
    `or` between them gives alternatives."""
    text = f"{words_of(item)} {item.name}".casefold()
    return any(
        all(word in text for word in words.split()) for words in keyword.casefold().split(" or ")
    )


def words_of(item: pytest.Item) -> str:
    """A check in words: the first paragraph of its docstring, else its name."""
    doc = getattr(getattr(item, "function", None), "__doc__", None)
    if doc:
        return " ".join(doc.strip().partition("\n\n")[0].split()).rstrip(".")
    return str(getattr(item, "originalname", item.name)).removeprefix("test_").replace("_", " ")


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def with_line_numbers(error: BaseException) -> BaseException:
    """The error; frames of its traceback without a line get the first one of their function.

    The time limit may interrupt an instruction that belongs to no line, and pytest expects one.
    """
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    numbered: TracebackType | None = None
    for entry in reversed(entries):
        line: int | None = entry.tb_lineno  # the type says that there always is one
        if line is None or line < 0:  # -1 until Python 3.11.2
            line = entry.tb_frame.f_code.co_firstlineno
        numbered = TracebackType(numbered, entry.tb_frame, entry.tb_lasti, line)
    return error.with_traceback(numbered)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt a check that neither ends nor fails. The seconds in which others computed in its
    place do not count."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - began >= seconds + seconds_in_queue() - queued:
            raise TimeIsUp(f"not done after {seconds:g} s")

    began, queued = time.monotonic(), seconds_in_queue()
    before = signal.signal(signal.SIGALRM, stop)
    # repeatedly, in case it is caught on the way, or too early
    others, _ = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(
            signal.ITIMER_REAL, max(others - (time.monotonic() - began), 0.001) if others else 0
        )
        signal.signal(signal.SIGALRM, before)
