"""Every help page fits a screen, has an example that works, and equals the recorded page."""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.cli.main import VERBS

ALL = [verb for verbs in VERBS.values() for verb in verbs]
SCREEN = 30
STARTS_SOMETHING = ("train", "resume")


def test_the_help_page_of_all_verbs(rlcli, pages):
    code, out, err = rlcli("--help")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= len(ALL) + 10, "a verb has more than one line"
    assert all(f" {verb} " in out for verb in ALL)
    assert out == pages


def test_without_arguments_examples_are_printed(rlcli, pages):
    code, out, err = rlcli()
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 10
    assert out == pages


@pytest.mark.parametrize("verb", ALL)
def test_the_help_page_of_each_verb(rlcli, pages, verb):
    code, out, err = rlcli(verb, "--help")
    assert (code, err) == (0, "")
    assert rlcli(verb, "-h")[1] == out
    assert len(out.splitlines()) <= SCREEN
    assert max(map(len, out.splitlines())) <= 80
    assert out == pages


@pytest.mark.parametrize("verb", ALL)
def test_help_pages_fit_a_narrow_terminal(rlcli, monkeypatch, verb):
    monkeypatch.setenv("COLUMNS", "40")
    # an example is for copying and never broken
    page = rlcli(verb, "--help")[1].partition("\nExample\n")[0]
    assert max(map(len, page.splitlines())) <= 40


def test_the_help_page_of_all_verbs_fits_a_narrow_terminal(rlcli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, rlcli("--help")[1].splitlines())) <= 40


@pytest.mark.parametrize("verb", ALL)
def test_every_help_page_has_one_example(rlcli, verb):
    page = rlcli(verb, "--help")[1]
    assert page.count("Example") == 1
    (example,) = page.partition("\nExample\n")[2].splitlines()
    assert f"rlcli {verb}" in example


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(verb, marks=pytest.mark.long) if verb == "test" else verb
        for verb in ALL
        if verb not in STARTS_SOMETHING
    ],
)
def test_the_example_of_each_help_page_works(rlcli, verb):
    example = rlcli(verb, "--help")[1].partition("\nExample\n")[2]
    command = example.strip().removeprefix("source <(").removesuffix(")")
    if "mine.yaml" in command and verb != "cp":
        Path("mine.yaml").write_text("extends: ppo_math\ntrain: {steps: 3}\n")
    words = shlex.split(command)
    assert words[0] == "rlcli"
    code, out, err = rlcli(*words[1:])
    if "runs/" in command:  # a run that is not here; the words are understood
        assert "runs/" in err
        return
    assert "error[" not in err
    assert code in ((0, 1) if verb == "doctor" else (0,))  # 1: something is missing on this machine
    assert out or err


def test_the_example_of_train_is_valid(rlcli, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    example = rlcli("train", "--help")[1].partition("\nExample\n")[2]
    assert rlcli("validate", *shlex.split(example)[2:])[0] == 0


def test_every_verb_but_chat_can_print_json(rlcli):
    for verb in set(ALL) - {"chat"}:
        assert "--json" in rlcli(verb, "--help")[1], verb


def test_verbs_are_not_imported_before_they_are_used():
    script = (
        "import sys, rlcli.cli.main; print([name for name in sys.modules if "
        "name.startswith('rlcli.cli.')])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert not [verb for verb in ALL if verb != "completion" and f"'rlcli.cli.{verb}'" in loaded]


def test_the_table_of_verbs_matches_the_modules():
    for verb in ALL:
        name = verb.replace("-", "_")
        assert hasattr(importlib.import_module(f"rlcli.cli.{name}"), name)
