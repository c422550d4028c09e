"""Processes with closed or redirected streams and limited terminals: no traceback,
and streams are not mixed up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.cli.output import print_table

REPOSITORY = Path(__file__).parents[2]
PLAIN = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ} | {
    "PYTHONPATH": str(REPOSITORY)
}
"""Variables that every shell has. Others, such as PYTHONUNBUFFERED, would affect the tests."""
PRINTING = {
    "alone": "",
    "help": "--help",
    "help-of-a-verb": "train --help",
    "version": "--version",
    "validate": "validate ppo_math",
    "plan": "plan ppo_math",
    "show": "show ppo_math",
    "component": "show ppo_actor",
    "explain": "explain ppo_math ppo.kl_ctl",
    "diff": "diff ppo_math sft_math",
    "schema": "schema",
    "tokens": "tokens sft_math",
    "ls": "ls",
    "completion": "completion bash",
    "json": "ls --json",
}


@pytest.fixture
def start(tmp_path):
    """Starts rlcli in an empty folder with a minimal environment."""

    def run(arguments, *, before="", variables=None, cwd=None, redirect="", **options):
        environment = {
            name: value for name, value in (PLAIN | (variables or {})).items() if value is not None
        }
        line = f'{before} exec "$0" -m rlcli "$@" {redirect}'
        words = arguments if isinstance(arguments, list) else arguments.split()
        return subprocess.run(
            ["bash", "-c", line, sys.executable, *words],
            env=environment,
            cwd=cwd or tmp_path,
            timeout=60,
            capture_output=True,
            check=False,
            **options,
        )

    return run


@pytest.mark.long
@pytest.mark.parametrize("name", PRINTING)
def test_a_broken_pipe_ends_quietly(name):
    command = [sys.executable, "-m", "rlcli", *PRINTING[name].split()]
    child = subprocess.Popen(command, env=PLAIN, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(60) == 141


@pytest.mark.parametrize("name", ["show", "component", "plan", "tokens"])
def test_notes_follow_the_output_where_both_go_to_one_file(start, name):
    together = start(PRINTING[name], redirect="2>&1").stdout
    apart = start(PRINTING[name])
    assert apart.stderr or name == "plan"
    assert together == apart.stdout + apart.stderr


def test_an_error_follows_the_output_where_both_go_to_one_file(start):
    together = start("plan no_such --json", redirect="2>&1").stdout
    assert together.startswith(b"{")
    assert b"\nerror[R51]" in together


@pytest.mark.parametrize("name", ["help", "ls", "json", "version", "schema"])
def test_a_full_disk_behind_stdout_is_reported(start, name):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    done = start(PRINTING[name], redirect=">/dev/full")
    assert done.returncode == 6
    assert (
        done.stderr.decode()
        == "error[RESOURCE]: cannot write the output: No space left on device\n"
    )


def test_closed_streams_are_not_an_error(start):
    assert start("ls datasets", redirect=">&-").returncode == 0
    assert start("ls datasets", redirect="<&-").stdout
    assert start("validate ppo_math", redirect="<&- >&- 2>&-").returncode == 0
    done = start("plan no_such", redirect="2>&-")
    assert (done.returncode, done.stdout) == (2, b"")  # talk never goes where data belong
    done = start("plan no_such", redirect=">&-")
    assert done.returncode == 2
    assert done.stderr.startswith(b"error[R51]")


def test_a_full_disk_behind_stderr_changes_nothing(start):
    if Path("/dev/full").exists():
        assert start("plan no_such", redirect="2>/dev/full").returncode == 2


def test_a_deleted_working_directory_is_reported(start, tmp_path):
    gone = "mkdir gone && cd gone && rmdir ../gone &&"
    for arguments in ("plan ppo_math", "ls", "train ppo_math", "cp ppo_math mine.yaml"):
        done = start(arguments, before=gone)
        assert (done.returncode, done.stdout) == (6, b"")
        assert b"error[RESOURCE]: the working directory was deleted" in done.stderr
        assert b"Traceback" not in done.stderr
    assert start("--help", before=gone).returncode == 0


def test_verbs_work_without_home(start):
    for arguments in ("validate ppo_math", "plan ppo_math", "ls"):
        assert start(arguments, variables={"HOME": None}).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [b"\xff"],
        [b"plan", b"\xff"],
        [b"plan", b"ppo_math", b"name=\xff"],
        [b"plan", b"ppo_math", b"\xff=1"],
        [b"--project", b"\xff", b"ls"],
        [b"show", b"dataset", b"\xff"],
        [b"ls", b"\xff"],
        [b"plan", b"--\xff"],
        [b"plan", b"ppo_math", b"--with", b"\xff"],
        [b"plan", b"\xff", b"--json"],
    ],
)
def test_arguments_that_are_not_text_are_refused(start, arguments):
    done = start(arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(b"error[")
    assert b"\xff" not in done.stderr + done.stdout
    if b"--json" in arguments:
        assert json.loads(done.stdout)["exit_code"] == 2


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PRINTING if name not in ("json", "schema")])
def test_output_is_ascii_on_a_terminal_without_unicode(start, name):
    ascii_only = {
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "PYTHONIOENCODING": "ascii:strict",
    }
    done = start(PRINTING[name], variables=ascii_only)
    assert done.returncode == 0
    text = (done.stdout + done.stderr).decode("ascii")
    assert "\\u" not in text  # every sign that we use has a plain form
    assert "\\x" not in text


def test_json_is_valid_without_unicode(start, tmp_path):
    (tmp_path / "mine.yaml").write_text("# größer → besser\nextends: ppo_math\n", encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "mine.yaml").rename(tmp_path / "recipes/mine.yaml")
    done = start("ls recipes --json", variables={"PYTHONIOENCODING": "ascii:strict"})
    (entry,) = [
        entry
        for entry in json.loads(done.stdout.decode("ascii"))["recipes"]
        if entry["name"] == "mine"
    ]
    assert entry["doc"] == "größer → besser"


@pytest.mark.parametrize("name", PRINTING)
def test_output_without_a_terminal(start, name):
    """Results on stdout, messages on stderr, no colour,
    and 80 columns except in text for copying."""
    done = start(PRINTING[name])
    assert done.returncode == 0
    assert b"error[" not in done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    text = done.stdout.decode().replace(str(REPOSITORY), "")
    assert text
    if name not in ("json", "schema", "completion", "show"):
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", ["tokens", "ls", "component", "plan"])
def test_no_color_takes_precedence_over_force_color(start, name):
    done = start(PRINTING[name], variables={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    # bold and dim are no colours
    assert not re.search(rb"\x1b\[(\d+;)*(3|4|9|10)[0-7]\b", done.stdout)


def test_heads_of_tables_are_printed_as_they_are_and_safe_for_a_terminal(capsys):
    heads = ["", "held-out accuracy[easy]", "held-out [/bold]", "held-out \x1b[2J\u202e"]
    print_table(heads, [["a", "1", "2", "3"]], numbers=True)
    head = capsys.readouterr().out.splitlines()[0]
    shown = [*heads[1:3], "held-out \\x1b[2J\\u202e"]
    assert re.split(" {2,}", head.strip()) == shown


@pytest.mark.parametrize(
    "label", ["ppo.kl_ctl=0.02", "ppo.kl_ctl=0.02 ppo.eps_clip=0.3 models.actor.backend=fsdp"]
)
def test_numbers_are_not_split_in_a_table_that_is_too_wide(label, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    columns = [
        "",
        "runs",
        "steps",
        "held-out accuracy",
        "reward in training",
        "KL from the reference",
        "seconds",
    ]
    row = [label, "3", "200", "0.954 ±0.011", "0.912 ±0.0012", "-0.00213 ±0.0041", "1.23 ±0.045"]
    print_table(columns, [row], numbers=True)
    out = capsys.readouterr().out
    numbers = [word for cell in row[1:] for word in cell.split()]
    assert {*numbers} <= {*out.split()}
    assert max(map(len, out.splitlines())) <= 80
