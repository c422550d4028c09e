"""Runs the checks of a component in two processes. A fork of this one, which has loaded everything
already, takes them from the end of the list while this one takes them from its beginning, until
they meet. What the fork does not finish, because a check ends it or never returns, runs here: so
the report is the same as if there were no fork."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain, pairwise
from pathlib import Path
from threading import active_count
from typing import Any, NoReturn

import pytest

from rlcli.processes import ProcessClock, allowed_cores, die_with_parent
from rlcli.testing.process_state import StartedTasks
from rlcli.testing.reporter import Reporter
from rlcli.testing.selection import contract_of

FEWEST, MOST = 12, 4096
"""Numbers of items for which a fork pays, and which a pipe holds."""
PATIENCE = 5.0
"""Seconds after the time limit of a check, or an interrupt, in which the fork can end it by
itself."""
INTERRUPT_SECONDS = 0.5
"""Seconds for the fork to end after a terminal has interrupted both processes."""
LOOK_SECONDS = 0.02
"""Seconds between two looks at what the fork has reported."""


def run_items(
    session: pytest.Session, items: Sequence[pytest.Item], reporter: Reporter, check_seconds: float
) -> str:
    """Run all items, in two processes if there are cores for them. Returns what the second one has
    left running, in words; empty if nothing."""
    is_worthwhile = FEWEST <= len(items) <= MOST and allowed_cores() > 1
    has_threads = active_count() > 1  # a fork lacks them, and what waits for them hangs
    if session.config.option.maxfail or has_threads or not is_worthwhile:
        _run(session, items)
        return ""
    units = _units(items)
    with (
        _threads(max(1, allowed_cores() // 2)),
        closing(_Unclaimed(len(units))) as unclaimed,
        tempfile.TemporaryFile() as events,
        closing(_Fork(session, reporter, events.fileno())) as second,
    ):
        second.start(unclaimed.of(reversed(units)))
        ended = set()
        for item in _run_each(session, unclaimed.of(units)):
            ended.add(item.nodeid)
            second.deliver()
        second.wait(check_seconds)
    ended |= second.ended
    _run(session, [item for item in items if item.nodeid not in ended])
    return second.left


def _units(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """What one process runs as a whole: a check of a contract with all its cases, or the other
    tests of a file, which may rely on their order and on what they share; and all that share a
    fixture, as two processes may not be able to start its server. The longest files are last, where
    the second process begins."""
    checks: dict[str, list[pytest.Item]] = {}
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if _is_of_contract(item):
            checks.setdefault(item.nodeid.partition("[")[0], []).append(item)
        else:
            files.setdefault(item.path, []).append(item)
    units = _joined([*checks.values(), *files.values()])
    return sorted(units, key=lambda unit: sum(not _is_of_contract(item) for item in unit))


def _is_of_contract(item: pytest.Item) -> bool:
    """Whether a contract has this check, rather than a test file that adds it to its contract."""
    contract = contract_of(item)
    if contract is None or not isinstance(item, pytest.Function):
        return False
    return item.function.__module__ != contract.__module__


def _joined(units: Iterable[list[pytest.Item]]) -> list[list[pytest.Item]]:
    """Those that share a fixture, directly or through others, are one."""
    joined: list[tuple[set[object], list[pytest.Item]]] = []
    for unit in units:
        fixtures = {fixture for item in unit for fixture in _shared_fixtures(item)}
        related = [other for other in joined if not other[0].isdisjoint(fixtures)]
        joined = [other for other in joined if other[0].isdisjoint(fixtures)]
        fixtures = fixtures.union(*(before for before, _ in related))
        joined.append((fixtures, [item for _, items in related for item in items] + unit))
    return [unit for _, unit in joined]


def _shared_fixtures(item: pytest.Item) -> Iterator[object]:
    """The definitions of fixtures that its file, or a conftest, makes once for several tests."""
    if not isinstance(item, pytest.Function):
        return
    for fixture in chain.from_iterable(item._fixtureinfo.name2fixturedefs.values()):
        module = getattr(fixture.func, "__module__", "")
        is_of_project = module == item.module.__name__ or module.rpartition(".")[2] == "conftest"
        if is_of_project and fixture.scope != "function":
            yield fixture


class _Unclaimed:
    """The number of units that neither process has claimed yet, as that of bytes in a pipe."""

    def __init__(self, count: int):
        self._bytes, end = os.pipe()
        os.write(end, bytes(count))
        os.close(end)

    def of(self, units: Iterable[Sequence[pytest.Item]]) -> Iterator[pytest.Item]:
        """The items of those that this process has claimed, until none is left."""
        for unit in units:
            if not os.read(self._bytes, 1):
                return
            yield from unit

    def close(self) -> None:
        os.close(self._bytes)


def _run(session: pytest.Session, items: Iterable[pytest.Item]) -> None:
    for _ in _run_each(session, items):
        pass


def _run_each(session: pytest.Session, items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Run each item, and yield it. pytest keeps the fixtures that the next one needs too."""
    for item, following in pairwise(chain(items, [None])):
        assert item is not None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        yield item
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


class _Fork:
    """The second process, as the first one sees it."""

    def __init__(self, session: pytest.Session, reporter: Reporter, events: int):
        """`events`: descriptor of a file with a line of JSON for each event, which the fork writes
        and its parent reads."""
        self._session = session
        self._config = session.config
        self._reporter = reporter
        self._events = events
        self._position = 0
        """How much of them has been read, in bytes."""
        self._reports: list[pytest.TestReport] = []
        """Those of the item that it runs."""
        self._running = ""
        """Name of that item; empty before the first."""
        self._pid = 0
        self.ended: set[str] = set()
        """Names of the items that it has run."""
        self.left = ""

    def start(self, items: Iterator[pytest.Item]) -> None:
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # made once
        parent = os.getpid()
        with _captured_apart(self._config):
            self._pid = os.fork()
        if self._pid == 0:
            self._be(parent, items)

    def _be(self, parent: int, items: Iterator[pytest.Item]) -> NoReturn:
        """The body of the fork. It exits with `os._exit`, because the parent's exit handlers must
        not run here; what it has not finished by then, for whatever reason, runs there."""
        try:
            die_with_parent()
            if os.getppid() == parent:
                gc.freeze()  # finalise nothing of the parent's here
                with _threads(1):
                    self._run(items)
        finally:
            os._exit(0)

    def _run(self, items: Iterator[pytest.Item]) -> None:
        running = StartedTasks.now()
        sender = _Sender(self._config, self._events)
        self._config.pluginmanager.unregister(self._reporter)
        self._config.pluginmanager.register(sender)
        _run(self._session, items)
        sender.send("left", StartedTasks.now().left_since(running))

    def deliver(self) -> bool:
        """Report what it has done since the last call. Returns whether it has done anything."""
        size = os.fstat(self._events).st_size
        unread = os.pread(self._events, size - self._position, self._position)
        lines = unread[: unread.rfind(b"\n") + 1].splitlines(keepends=True)
        self._position += sum(map(len, lines))
        for line in lines:
            self._take(*json.loads(line))
        return bool(lines)

    def _take(self, event: str, content: Any) -> None:
        if event == "started":
            self._running, self._reports = content, []
        elif event == "report":
            self._reports.append(self._received(content))
        elif event == "ended":
            for report in self._reports:
                self._config.hook.pytest_runtest_logreport(report=report)
            self._reporter.pytest_runtest_logfinish(content)
            self.ended.add(content)
        else:
            self.left = content

    def _received(self, data: dict[str, Any]) -> pytest.TestReport:
        hook = self._config.hook
        report = hook.pytest_report_from_serializable(config=self._config, data=data)
        if isinstance(report.longrepr, list):  # JSON has no tuples
            report.longrepr = tuple(report.longrepr)
        return report

    def wait(self, check_seconds: float) -> None:
        """Wait until it has ended, or is in the same item for longer than that may take."""
        clock = ProcessClock([self._pid])
        while not self._has_ended():
            if self.deliver():
                clock = ProcessClock([self._pid])
            remaining = check_seconds + PATIENCE - clock.seconds()
            if remaining < 0:
                return
            self._reporter.waits_for(self._running, remaining)
            time.sleep(LOOK_SECONDS)
        self.deliver()

    def _has_ended(self) -> bool:
        if self._pid and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._pid = 0
        return self._pid == 0

    def close(self) -> None:
        """End it. An interrupt lets its check end what that has started; a terminal's has reached
        it already."""
        if self._ends_within(INTERRUPT_SECONDS):
            return
        os.kill(self._pid, signal.SIGINT)
        if not self._ends_within(PATIENCE):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._has_ended():
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
        return True


class _Sender:
    """A pytest plugin that writes down, in the fork, what its parent is to report."""

    def __init__(self, config: pytest.Config, events: int):
        """`events`: descriptor of the file that it appends to."""
        self._config = config
        self._events = events
        self._process = os.getpid()

    def send(self, event: str, content: Any) -> None:
        if os.getpid() != self._process:
            os._exit(1)  # a test has forked, and its child came back from there
        line = json.dumps([event, content], default=str)
        os.write(self._events, f"{line}\n".encode())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.send("started", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        # they are reported as text, and JSON would change it: it has no tuples
        data["user_properties"] = [(name, str(value)) for name, value in report.user_properties]
        self.send("report", data)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.send("ended", nodeid)


@contextmanager
def _captured_apart(config: pytest.Config) -> Iterator[None]:
    """Two processes that fork here do not write what they capture to the same file."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    try:
        yield
    finally:
        capture.start_global_capturing()
        capture.suspend_global_capture()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Within this context, torch computes with at most so many threads, if it is loaded: threads of
    both processes that share a core wait for each other."""
    torch = sys.modules.get("torch")
    before = 1 if torch is None else torch.get_num_threads()
    # setting what is set already fails now and then in a fork
    if torch is None or before <= count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
