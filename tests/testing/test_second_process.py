"""Checks of a component that run in two processes are reported as if they ran in one."""

import os
import signal
import sys
import textwrap
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import psutil
import pytest
from toy_runs import Diary, outcomes, own_tests, run

from rlcli.testing import second_process

MANY = """
import os
import time

import pytest

@pytest.mark.parametrize("number", range(40))
def test_many(number, tmp_path, record_property):
    record_property("note", (number, {number: None}))
    assert list(tmp_path.iterdir()) == []

@pytest.mark.parametrize("number", range(8))
def test_odd(number):
    time.sleep(0.05)
    assert number % 2 == 0

def test_skipped():
    pytest.skip("for no reason")

def test_output(capfd):
    os.write(1, b"hello")
    assert capfd.readouterr().out == "hello"
"""
IN_SECOND = """
import os
import signal
import subprocess
import time

import pytest

PARENT = {parent}

@pytest.mark.parametrize("number", range(20))
def test_many(number): ...

def test_last():
    if os.getpid() != PARENT:
        {does}
"""
"""Own tests of which the last one does something in the second process."""
SLOWLY = ("seconds=0.5",)
"""Arguments with which the first process checks the contract until the second one has begun."""
SWALLOW = """
        while True:
            try:
                time.sleep(1)
            except BaseException:
                pass
"""
CLEAN_UP = """
        try:
            time.sleep(100)
        finally:
            open("cleaned", "w").close()
"""


@pytest.fixture
def cores(monkeypatch):
    """Sets how many cores there are, whatever threads run these tests."""
    monkeypatch.setattr(second_process, "active_count", lambda: 1)
    return lambda count: monkeypatch.setattr(second_process, "allowed_cores", lambda: count)


def in_second(project, does):
    own_tests(project, IN_SECOND.format(parent=os.getpid(), does=does))


def without_times(tested):
    checks = [check.as_json() | {"seconds": None} for check in tested.checks]
    return tested.as_json() | {"seconds": None, "checks": checks}


def reports_of(project):
    """What is reported of a component: its JSON, the checks in order, and the counts of JUnit."""
    diary = Diary()
    (tested,) = run("factor=0", "limit=2", *SLOWLY, diary=diary, junit=Path("report.xml"))
    (suite,) = ElementTree.parse(project / "report.xml").getroot()
    counts = {name: suite.get(name) for name in ("tests", "failures", "skipped", "errors")}
    return without_times(tested), [check.words for check in diary.ended], counts


def test_the_report_is_that_of_a_single_process(project, cores):
    own_tests(project, MANY)
    cores(1)
    expected = reports_of(project)
    cores(2)
    report, order, counts = reports_of(project)
    assert (report, order, counts) == expected
    assert order == [check["check"] for check in report["checks"]]
    assert counts == {"tests": "58", "failures": "7", "skipped": "2", "errors": "0"}


def test_the_tests_of_a_file_run_in_their_order_in_one_process(project, cores):
    cores(2)
    own_tests(
        project,
        """
        import os
        from pathlib import Path

        import pytest

        @pytest.mark.parametrize("number", range(40))
        def test_many(number):
            with Path("ran").open("a") as file:
                print(os.getpid(), number, file=file)
        """,
    )
    run(*SLOWLY)
    ran = (project / "ran").read_text().split("\n")
    process = ran[0].split()[0]
    assert process != str(os.getpid())
    assert ran == [f"{process} {number}" for number in range(40)] + [""]


def test_tests_that_a_file_adds_to_a_contract_run_in_their_order(project, cores):
    cores(2)
    own_tests(
        project,
        """
        import pytest
        from toy_contract_for_tests import ToyContract

        class TestContract(ToyContract):
            name = "toy-checked"
            args = {"seconds": 0.5}
            numbers = []

            @pytest.mark.parametrize("number", range(10))
            def test_first(self, number):
                self.numbers.append(number)

            def test_last(self):
                assert self.numbers == list(range(10))
        """,
    )
    (tested,) = run()
    assert outcomes(tested)["last"] == "ok"


def test_tests_that_share_a_fixture_run_in_one_process(project, cores, monkeypatch):
    cores(2)
    monkeypatch.delitem(sys.modules, "tests.interfaces.conftest", raising=False)  # that of our own
    file = own_tests(
        project,
        """
        import pytest
        from toy_contract_for_tests import ToyContract

        @pytest.mark.parametrize("number", range(20))
        def test_many(number, lock): ...

        class TestContract(ToyContract):
            name = "toy-checked"
            args = {"seconds": 0.5}

            @pytest.fixture(autouse=True)
            def locked(self, lock): ...
        """,
    )
    file.with_name("conftest.py").write_text(
        textwrap.dedent("""
        from pathlib import Path

        import pytest

        @pytest.fixture(scope="session")
        def lock():
            Path("lock").touch(exist_ok=False)
            yield
            Path("lock").unlink()
        """)
    )
    (tested,) = run()
    sys.modules.pop("tests.interfaces.conftest", None)
    assert outcomes(tested)["many"] == "ok"
    assert tested.count("FAIL") == 0


def test_threads_that_a_fork_would_lack_are_there(project, monkeypatch):
    monkeypatch.setattr(second_process, "allowed_cores", lambda: 2)
    own_tests(
        project,
        """
        from concurrent.futures import ThreadPoolExecutor

        import pytest

        POOL = ThreadPoolExecutor(1)
        POOL.submit(int).result()

        @pytest.mark.parametrize("number", range(20))
        def test_many(number):
            assert POOL.submit(int, number).result() == number
        """,
    )
    (tested,) = run(*SLOWLY, check_seconds=2.0)
    assert tested.count("FAIL") == 0


def test_a_child_that_comes_back_from_a_test_reports_nothing(project, cores):
    cores(2)
    in_second(
        project,
        """
        if os.fork() == 0:
            raise RuntimeError("in a child")
        os.wait()
        """.strip(),
    )
    (tested,) = run(*SLOWLY)
    assert tested.count("FAIL") == 0


@pytest.mark.parametrize(
    "does", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", SWALLOW.strip()]
)
def test_checks_that_the_second_process_does_not_finish_run_in_the_first(
    project, cores, monkeypatch, does
):
    cores(2)
    monkeypatch.setattr(second_process, "PATIENCE", 0.5)
    in_second(project, does)
    (tested,) = run(*SLOWLY, check_seconds=1.0)
    assert {check.words: check.cases for check in tested.checks}["many"] == 20
    assert tested.count("FAIL") == 0


def test_what_the_second_process_leaves_running_is_named(project, cores):
    cores(2)
    in_second(project, "subprocess.Popen(['sleep', '77'])")
    (tested,) = run(*SLOWLY)
    assert tested.checks[-1].words == "nothing that was started is left running"
    assert "process sleep 77" in tested.checks[-1].failure.finding


def test_an_interrupt_ends_both_processes(project, cores):
    class Impatient(Diary):
        """Presses Ctrl-C while the first process waits for the second."""

        def begin(self, words):
            if words == "last":
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    cores(2)
    in_second(project, CLEAN_UP.strip())
    others = psutil.Process().children()
    diary, before = Impatient(), signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(*SLOWLY, diary=diary)
    finally:
        signal.signal(signal.SIGINT, before)
    assert diary.components[-1] == "interrupted: last"
    assert time.monotonic() - began < 60
    assert set(psutil.Process().children()) <= set(others)
    assert (project / "cleaned").exists()
