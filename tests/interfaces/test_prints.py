"""What a user's code prints in a process of its own is shown in the log of its rank."""

import io
import sys

import pytest

from rlcli.interfaces import _prints
from rlcli.interfaces._environment_pool import EnvironmentPool, EnvironmentSettings
from rlcli.interfaces._prints import Prints, show_prints

SOURCE = r"""
import logging, os, sys
from rlcli.api.environment import Environment, Observation, register_environment

logging.basicConfig(format="%(message)s")
print("imported with", os.environ["GAME_TOKEN"])


class Game(Environment):
    VARIABLES = ("token_variable",)

    def __init__(self, token_variable):
        pass

    def step(self, action):
        logging.warning("asked for %s", action)
        print("\x1b[2J", os.environ["GAME_TOKEN"], file=sys.stderr)
        return Observation(action)


register_environment("zz_printing_game", Game)
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))
    monkeypatch.setenv("GAME_TOKEN", "tell-nobody")
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    folder = tmp_path / "interfaces" / "environments"
    folder.mkdir(parents=True)
    (folder / "zz_printing_game.py").write_text(SOURCE)
    settings = EnvironmentSettings(
        environment="zz_printing_game",
        args={"token_variable": "GAME_TOKEN"},
        longest=9,
        call_seconds=30.0,
        memory_bytes=1 << 32,
    )
    pool = EnvironmentPool(settings, most=1)
    yield pool
    pool.close()


def test_prints_of_an_environment_are_shown_safe_for_a_terminal_without_its_secrets(pool, capsys):
    capsys.readouterr()  # of the import here
    with pool.calls() as calls:
        calls.ask(0, {"call": "reset", "row": {}, "seed": 0})
        calls.take(wait=True)
        for action in ("a", "b"):
            calls.ask(0, {"call": "step", "action": action})
            assert calls.take(wait=True) == [(0, {"value": [action, 0.0, False]})]
    lines = capsys.readouterr().err.splitlines()
    moves = [[f"asked for {action}", "\\x1b[2J <redacted>"] for action in ("a", "b")]
    assert lines == ["imported with <redacted>", *moves[0], *moves[1]]


def kept_prints(monkeypatch):
    """Of this process, until the test is over."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    return Prints()


def test_each_reply_has_the_end_of_what_was_printed_since_the_last_one(monkeypatch):
    prints = kept_prints(monkeypatch)
    monkeypatch.setattr(_prints, "HELD", 9000)
    for _ in range(10):
        print("x" * 4000, end="")
        print("end", file=sys.stderr)
    assert prints.added_to({"value": 1}) == {"value": 1, "printed": "x" * 2996 + "end\n"}
    assert prints.added_to({"value": 2}) == {"value": 2}
    print("secret", "x" * 2998)
    printed = prints.added_to({}, lambda text: text.replace("secret", "?"))["printed"]
    assert printed == " " + "x" * 2998 + "\n"


def test_code_may_treat_the_stream_as_a_standard_one(monkeypatch):
    prints = kept_prints(monkeypatch)
    sys.stdout.reconfigure(line_buffering=True)
    assert sys.stderr.fileno() == 2
    sys.stdout.buffer.write(b"\xff")
    sys.stdout.write("\ud800")
    sys.stdout.close()
    print("after")
    assert prints.added_to({}) == {"printed": "�\\ud800after\n"}


def test_a_closed_stream_costs_only_the_lines(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    show_prints("text")
