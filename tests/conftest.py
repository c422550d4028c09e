"""What holds for all tests."""

import gc
import signal
import sys
import time

import pytest
from hypothesis import HealthCheck, settings

from rlcli.testing.contract import Contract

# a busy machine is no fault of what is tested
PATIENT = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("quick", PATIENT, max_examples=25)
settings.register_profile("thorough", PATIENT, max_examples=100)
settings.load_profile("quick")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)
# the command collects nothing while it reads a recipe; tests read thousands of them
gc.set_threshold(50_000, 10, 20)

OF_EVERY_VALUE = ("test_every_argument_", "test_every_variant", "test_any_configuration_")
"""How the names of those checks of contracts begin that repeat others for each value of each
argument. `rlcli test` makes them, and for what is built in `make test-exhaustive` does."""
LONG = ("test_elsewhere", "test_long_streams")
"""Checks of contracts that take longest: of rows far into a stream, and in another process."""
MANY = 50
"""Modules that are imported between two tests when much has been made that stays."""
_known = 0
"""Modules when garbage was last told from what stays."""

NO_TIME = "not run: no time was left"
"""Why a test is skipped after `--start-before`."""


def pytest_addoption(parser):
    parser.addoption(
        "--start-before",
        type=float,
        default=float("inf"),
        metavar="UNIX_TIME",
        help="skip tests that would start later, and say how many",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip a test for which no time is left, before its fixtures are made."""
    _freeze_what_stays()
    if time.time() > item.config.getoption("start_before"):
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", ())
    too_late = sum(NO_TIME in str(report.longrepr) for report in skipped)
    if too_late:
        warning = f"!!! {too_late} TESTS WERE NOT RUN: NO TIME WAS LEFT"
        terminalreporter.write_line(warning, red=True)


def _freeze_what_stays():
    """What libraries have made is not looked at again: some collect garbage each time that they are
    used, and pytest itself as it ends."""
    global _known
    if len(sys.modules) >= _known + MANY:
        gc.freeze()
        _known = len(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark checks of contracts that are exhaustive or long, before marks select."""
    for item in items:
        if not issubclass(getattr(item, "cls", None) or object, Contract):
            continue
        if item.originalname.startswith(OF_EVERY_VALUE):
            item.add_marker(pytest.mark.exhaustive)
        if item.originalname in LONG:
            item.add_marker(pytest.mark.long)
