"""The line that says what a command is doing: in a pseudo-terminal, and where lines stay."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from rlcli.api.headway import BYTES, Count
from rlcli.observe import status_line
from rlcli.observe.status_line import SILENCE, StatusLine, StatusLog

SCRIPT = """
import sys, time
from rlcli.api.headway import doing
from rlcli.observe.status_line import status_line
def say(text): print(text, file=sys.stderr)
with status_line(say):
    with doing("reading a long file", 8, "bytes") as work:
        for _ in range(8):
            work.advance()
            time.sleep({seconds})
    print("result")
"""


def in_terminal(command, **variables):
    """What a command prints on a terminal of 80 columns, and on its stdout, which is a pipe."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"} | variables
    process = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=theirs, env=environment, check=True, timeout=60
    )
    os.close(theirs)
    drawn = b"".join(iter(lambda: read(ours), b"")).decode()
    os.close(ours)
    return drawn, process.stdout.decode()


def read(terminal):
    try:
        return os.read(terminal, 100_000)
    except OSError:  # all of it has been read, and nobody has it open any more
        return b""


def script(seconds):
    return [sys.executable, "-c", SCRIPT.format(seconds=seconds)]


def test_what_takes_long_is_drawn_with_the_time_left_and_erased():
    drawn, result = in_terminal(script(0.25))
    assert result == "result\n"
    lines = re.findall(r"reading a long file  (━*)(─*)  (\d) bytes of 8 bytes  eta 0:0\d", re.sub(
        r"\x1b\[[\d;]*m", "", drawn
    ))  # fmt: skip
    assert lines, drawn
    assert all(len(full) + len(rest) == 16 for full, rest, _ in lines)
    assert drawn.endswith("\x1b[2K")  # the line is erased
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")  # and the cursor is visible


def test_what_is_short_is_not_drawn():
    assert in_terminal(script(0.0)) == ("", "result\n")


def test_a_phase_that_ends_while_its_line_appears_leaves_no_line_behind(monkeypatch):
    monkeypatch.setattr(status_line, "APPEARS_AFTER", 0.0)
    console = Console(file=io.StringIO(), force_terminal=True)
    is_opening, may_open = threading.Event(), threading.Event()

    def open_console():
        is_opening.set()
        may_open.wait(60)
        return console

    line = StatusLine(open_console)
    line.phase("first")
    assert is_opening.wait(60)
    line.phase("")
    line.phase("second")
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    may_open.set()
    for timer in timers:
        timer.join(60)
    line.phase("")
    drawn = console.file.getvalue()
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")  # the cursor is visible


def test_nothing_is_drawn_on_a_dumb_terminal():
    drawn, _ = in_terminal(script(0.1), TERM="dumb")
    assert drawn == ""


def test_where_lines_stay_a_count_is_printed_after_half_a_minute_of_silence():
    now, lines = [0.0], []
    log = StatusLog(lines.append, lambda: now[0])
    log.phase("verifying")
    for done in range(1, 91):
        now[0] += 1
        log.count(Count(done, 90, BYTES))
    assert lines == [
        "verifying: 30 bytes of 90 bytes, eta 1:00",
        "verifying: 60 bytes of 90 bytes, eta 0:30",
    ]
    log.note_output()
    now[0] += SILENCE - 1
    log.count(Count(1, 90, BYTES))
    assert len(lines) == 2


@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_a_command_that_prints_json_or_is_quiet_draws_nothing(option, tmp_path):
    sleeper = tmp_path / "slow.py"
    sleeper.write_text(
        "import sys, time\n"
        "from rlcli.observe import run_search\n"
        "from rlcli.api.headway import doing\n"
        "def slow(root=None):\n"
        "    with doing('looking for runs'):\n"
        "        time.sleep(0.8)\n"
        "    return []\n"
        "run_search.find_runs = slow\n"
        "from rlcli.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    drawn, _ = in_terminal([sys.executable, str(sleeper), "status"], **environment)
    assert "looking for runs" in drawn
    drawn, _ = in_terminal([sys.executable, str(sleeper), "status", option], **environment)
    assert drawn == ""
