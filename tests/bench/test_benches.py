"""A bench finds what it is there to find: a fault is planted, and a figure is above its limit. Small sizes."""

from __future__ import annotations

import runpy
import time
from pathlib import Path

import pytest

from rlcli.runtime.calls import Calls

BENCHES = Path(__file__).parent


@pytest.fixture
def ahead(tmp_path, monkeypatch):
    """main(): the exit code; with max_staleness 0 whatever was asked for if `is_broken`."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RLCLI_PROJECT", "")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(tmp_path)
    bench = runpy.run_path(str(BENCHES / "ahead.py"))

    def run(is_broken: bool) -> int:
        settings = bench["settings"]
        if is_broken:
            bench["measure"].__globals__["settings"] = lambda staleness, unit, steps: settings(0, unit, steps)
        return bench["main"](["--staleness", "1", "--unit", "0.2", "--steps", "8"])

    return run


def test_ahead_finds_that_generation_does_not_run_ahead(ahead, capsys):
    assert ahead(is_broken=True) == 1
    assert "times the least, 1.25 allowed" in capsys.readouterr().out


def test_ahead_has_a_limit_for_each_staleness():
    judge = runpy.run_path(str(BENCHES / "ahead.py"))["above"]
    figures = {"max_staleness": 4, "seconds": 0.5, "of_least": 1.05, "staleness": 3.9}
    assert judge(figures) == []
    assert judge(figures | {"of_least": 1.4}) == ["max_staleness 4: 1.4 times the least, 1.25 allowed"]
    assert judge(figures | {"staleness": 4.2}) == ["max_staleness 4: samples are 4.2 steps old"]
    assert judge(figures | {"max_staleness": 0, "staleness": 0, "of_least": 1.85}) == []


@pytest.fixture
def scale(tmp_path, monkeypatch):
    """measure(): what is above its limit."""
    monkeypatch.setenv("RLCLI_PROJECT", "")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(tmp_path)
    bench = runpy.run_path(str(BENCHES / "scale.py"))
    bench["prepare"](tmp_path)
    return lambda: bench["measure"]([8], samples=16, real=0, staleness=0)[1]


def test_scale_finds_sleep_in_each_dispatch_and_nothing_without_it(scale, monkeypatch):
    assert scale() == []
    dispatch = Calls.dispatch

    def slow(self, *arguments, **more):
        time.sleep(0.5)
        return dispatch(self, *arguments, **more)

    monkeypatch.setattr(Calls, "dispatch", slow)
    above = scale()
    assert any("8 ranks: a call costs 5" in line for line in above), above
    assert any("of the critical path" in line for line in above), above
