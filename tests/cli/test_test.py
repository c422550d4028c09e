"""`rlcli test`: its report, its JSON, its exit codes,
and that its help page loads no heavy library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.cli.checks import CheckPrinter
from rlcli.errors import ProjectError, ResourceError
from rlcli.testing.results import Check, CheckFailure, Examined
from rlcli.testing.subjects import Subject

ROUNDED = CheckFailure("assert 3 == 4", where="tests/interfaces/test_custom.py:7")
SUBJECT = Subject("interface", "custom", Path("interfaces/custom.py"))
MEAN = CheckFailure(
    "loss differs by 0.031 between 1 and 3 micro-batches",
    (
        "the loss is a mean of the micro-batch; return a sum, the engine divides by "
        "the weight of all of them"
    ),
    "interfaces/custom.py:48",
    "the traceback",
)
CRASH = CheckFailure("ZeroDivisionError: division by zero", where="interfaces/custom.py:9")


def check(words, outcome="ok", **fields):
    return Check(
        words, outcome, f"interface/custom::TestContract::test_{len(words)}", 0.5, **fields
    )


CHECKS = (
    check("registers under its name, read without importing it"),
    check("packed batch is as padded batch", note="max diff 3e-7"),
    check(
        "two steps run",
        note="not on this machine, so with bytes as tokens: Qwen/Qwen2.5-0.5B-Instruct",
    ),
    check(
        "the same for any number of micro-batches",
        "FAIL",
        failure=MEAN,
        cases=3,
        failed_cases=("2", "3"),
    ),
    check("equal rewards", "FAIL", failure=CRASH),
    check("a rank without samples", "FAIL", failure=CRASH),
    check("respects the limits of generation", "skip", reason="does not generate"),
    check("counts the tokens that it generates", "skip", reason="does not generate"),
    check("gives a number for each text", "skip", reason="does not score texts"),
    check("the same on two processes", "skip", reason="not tried: the ranks did not finish"),
    check(
        "the name of a check that is so long that it does not fit into one line of a narrow page"
    ),
    check("adds up", own_file="tests/interfaces/test_custom.py"),
    check("is empty", "skip", reason="not today", own_file="tests/interfaces/test_custom.py"),
    check("divides", own_file="tests/interfaces/test_custom.py"),
    check("rounds", "FAIL", failure=ROUNDED, own_file="tests/interfaces/test_custom.py"),
    check("cuts", own_file="tests/interfaces/test_custom.py"),
    check("helps", own_file="tests/interfaces/test_helper.py"),
)
TESTED = Examined(SUBJECT, CHECKS, 9.2)


def report(traceback=False, tested=TESTED):
    printer = CheckPrinter(traceback)
    with printer:
        if tested.broken is None:
            printer.component(tested.subject, len(tested.checks))
        for performed in tested.checks:
            printer.begin(performed.words)
            printer.end(performed)
        printer.done(tested)


def test_a_report_fits_80_columns(capsys, monkeypatch, pages):
    monkeypatch.setenv("COLUMNS", "80")
    report()
    captured = capsys.readouterr()
    assert captured.err == ""
    assert max(map(len, captured.out.splitlines())) <= 80
    assert captured.out == pages


def test_a_traceback_is_shown_on_request(capsys):
    report()
    assert "the traceback" not in capsys.readouterr().out
    report(traceback=True)
    assert capsys.readouterr().out.count("the traceback") == 1


def test_reports_may_have_colours_but_no_control_characters(capsys, monkeypatch):
    evil = Examined(
        SUBJECT,
        (check("a \x1b]0;title\x07 b", "FAIL", failure=CheckFailure("\x1b[2J", "\x07")),),
        1.0,
    )
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    report(tested=evil)
    out = capsys.readouterr().out
    assert "\x1b[1;31m" in out
    assert "\x1b]" not in out
    assert "\x1b[2J" not in out
    assert "\x07" not in out


def test_a_component_that_cannot_be_loaded_is_reported(capsys):
    report(
        tested=Examined(
            SUBJECT,
            broken=ProjectError("the file cannot be imported", where="interfaces/custom.py:3"),
        )
    )
    out = capsys.readouterr().out
    assert "interface custom cannot be loaded" in out
    assert "interfaces/custom.py:3" in out


def test_a_component_whose_library_is_not_installed_is_skipped(capsys):
    lacking = ResourceError("interface custom needs nonesuch", hint="pip install 'rlcli[extra]'")
    report(tested=Examined(SUBJECT, broken=lacking))
    out = capsys.readouterr().out
    assert "interface custom is skipped" in out
    assert "interface custom needs nonesuch: pip install 'rlcli[extra]'" in out


def test_progress_is_shown_on_a_terminal_and_erased(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    report()
    err = capsys.readouterr().err
    assert "loading" in err
    assert "interface custom 4/17 the same for any number of micro-batches" in err
    assert err.endswith("\r\x1b[2K")


def test_json_contains_every_check(rlcli):
    code, out, err = rlcli("test", "recipe", "sft_math", "-k", "validates or minimal", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["ok"], document["exit_code"]) == (True, 0)
    (component,) = document["components"]
    assert (component["kind"], component["name"], component["passed"]) == ("recipe", "sft_math", 2)
    assert [performed["check"] for performed in component["checks"]] == [
        "every key and value is valid",
        "it repeats nothing that its parents or the defaults say",
    ]
    assert {performed["outcome"] for performed in component["checks"]} == {"passed"}


def test_a_failed_check_exits_1_and_an_unknown_recipe_2(rlcli):
    code, out, err = rlcli("test", "recipe", "sft_math", "train.steps=none", "-k", "validates")
    assert (code, err) == (1, "")
    assert "FAIL  every key and value is valid" in out
    code, out, err = rlcli("test", "recipe", "sft_maht", "--json")
    assert code == 2
    assert json.loads(out)["problems"][0]["hint"] == "did you mean sft_math?"
    assert "error[R51]" in err


@pytest.mark.long
def test_several_components_are_summarised(rlcli):
    code, out, err = rlcli("test", "recipe", "-k", "validates")
    assert code == 0
    recipes = len(list((Path(__file__).parents[2] / "recipes").glob("*.yaml")))
    assert out.count("every key and value is valid") == recipes
    assert err.startswith(
        f"{recipes} of {recipes} components fulfil their contracts: {recipes} passed in "
    )


def test_an_unwritable_junit_file_is_reported_before_anything_runs(rlcli, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = rlcli("test", "recipe", "sft_math", "--junit", "file/report.xml")
    assert (code, out) == (6, "")
    assert "file/report.xml" in err


@pytest.mark.parametrize(
    "words", [["test", "--help"], ["test", "interface", "nonesuch"]], ids=" ".join
)
def test_help_and_mistakes_load_no_heavy_library(words):
    code = f"""
import sys
from rlcli.cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
heavy = ("torch", "pytest", "transformers", "numpy")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"
