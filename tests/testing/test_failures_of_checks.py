"""Where a failure is looked for: the component first, another process's traceback too."""

from __future__ import annotations

import pytest

from rlcli.errors import DataError
from rlcli.testing.contract import Violation
from rlcli.testing.failures import failure_of


def caught(error):
    with pytest.raises(type(error)) as info:
        raise error
    return info


def test_a_violation_keeps_its_own_location():
    failure = failure_of(caught(Violation("found", "cause", "interfaces/x.py:3")), [], "text")
    assert (failure.finding, failure.cause, failure.where) == (
        "found",
        "cause",
        "interfaces/x.py:3",
    )
    assert (
        str(Violation("found", "cause", "interfaces/x.py:3")) == "found\ncause\ninterfaces/x.py:3"
    )


def test_an_exception_whose_message_fails_is_named():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    failure = failure_of(caught(Mute()), [], "")
    assert failure.finding == "Mute: <its message cannot be shown: __str__ failed>"


def test_rlcli_errors_keep_their_hint_and_location():
    failure = failure_of(
        caught(DataError("row is torn", where="rows.jsonl:7", hint="mend it")), [], ""
    )
    assert (failure.finding, failure.cause, failure.where) == (
        "row is torn",
        "mend it",
        "rows.jsonl:7",
    )


def test_the_location_is_the_innermost_frame_in_the_component(tmp_path):
    component, shared = tmp_path / "interfaces" / "x.py", tmp_path / "interfaces" / "_x.py"
    trace = "\n".join(
        f'  File "{file}", line {line}, in f'
        for file, line in ((component, 3), (component, 9), (shared, 4))
    )
    info = caught(
        RuntimeError(f"rank 1 failed\nTraceback (most recent call last):\n{trace}\nValueError: no")
    )
    assert failure_of(info, [component, component.parent], "").where == f"{component}:9"
    assert failure_of(info, [tmp_path / "other.py", component.parent], "").where == f"{shared}:4"
    assert failure_of(info, [tmp_path / "other.py"], "").where == ""


def test_long_messages_are_truncated_and_bare_assertions_show_their_line():
    assert failure_of(caught(ValueError("\n".join("abcdefghijklmnop"))), [], "").finding.endswith(
        "l\n…"
    )
    assert failure_of(caught(KeyError()), [], "").finding == "KeyError"
    with pytest.raises(AssertionError) as info:
        exec_assertion()
    assert failure_of(info, [], "").finding == "raise AssertionError"


def exec_assertion():
    raise AssertionError
