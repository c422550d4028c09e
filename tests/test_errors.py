"""What reaches a terminal or a log, whoever has written it."""

from __future__ import annotations

import io
import logging

import pytest

from rlcli.cli import main as command_line
from rlcli.errors import DataError
from rlcli.messaging.messages import logged_failure

HOSTILE = "lm_head\x1b]0;title\x07\x1b[2J\u202e"


@pytest.fixture
def written():
    """What Python's own handler of warnings writes."""
    before, log = logging.getLogRecordFactory(), logging.getLogger("rlcli.tests")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log.addHandler(handler)
    yield stream
    log.removeHandler(handler)
    logging.setLogRecordFactory(before)


def test_names_in_warnings_and_tracebacks_send_nothing_to_a_terminal(written, capsys):
    with pytest.raises(SystemExit):
        command_line.main(["--version"])
    logging.getLogger("rlcli.tests").warning("the first of %d is %s\nand so on", 2, HOSTILE)
    logged_failure("rank 0")(DataError(HOSTILE))
    assert written.getvalue() == (
        "the first of 2 is lm_head\\x1b]0;title\\x07\\x1b[2J\\u202e\nand so on\n"
    )
    assert "\\x1b[2J" in capsys.readouterr().err
