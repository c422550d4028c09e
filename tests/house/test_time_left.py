"""`pytest --start-before`: what starts too late is not run, and that is said."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
A_TEST = "tests/house/test_time_left.py::test_an_example"


def test_an_example():
    pass


@pytest.mark.parametrize(("moment", "outcome"), [("0", "1 skipped"), ("1e12", "1 passed")])
def test_a_test_that_would_start_too_late_is_skipped_and_counted(moment, outcome):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0"]
    report = subprocess.run(
        [*command, f"--start-before={moment}", A_TEST],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert outcome in report
    assert ("!!! 1 TESTS WERE NOT RUN" in report) == (outcome == "1 skipped")
