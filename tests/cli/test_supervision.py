"""When a command is done by a child of the process that was started."""

import sys
from types import SimpleNamespace

import pytest

from rlcli.cli.supervision import WHOLE_PROCESS, is_to_supervise

OWN = SimpleNamespace(obj={WHOLE_PROCESS: True})


@pytest.mark.parametrize(("context", "no_supervisor", "expected"), [
    (OWN, False, True), (OWN, True, False), (SimpleNamespace(obj={WHOLE_PROCESS: False}), False, False),
    (SimpleNamespace(obj=None), False, False),
])  # fmt: skip
def test_a_process_of_its_own_is_supervised_unless_asked_otherwise(context, no_supervisor, expected):
    assert is_to_supervise(context, no_supervisor) is expected


def test_a_debugger_follows_the_process_that_trains():
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        assert not is_to_supervise(OWN, False)
    finally:
        sys.settrace(before)
