"""The verbs as a user meets them: output, exit codes, and nothing heavy loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.cli import main as command_line
from rlcli.cli.output import print_table
from rlcli.topology.drawing import ranks_text

REPOSITORY = Path(__file__).parents[2]


def test_version_is_printed(rlcli):
    assert rlcli("--version")[1].startswith("rlcli ")


def test_validate_reports_the_warm_start_and_the_layers(rlcli):
    code, out, _ = rlcli("validate", "ppo_math", "ppo.kl_ctl=0.1")
    assert code == 0
    assert out.startswith("ok")
    assert "sft_math" in out
    document = json.loads(rlcli("validate", "ppo_math", "--json")[1])
    assert document["ok"] is True
    assert document["runs_first"] == ["sft_math"]
    assert document["layers"][-1].endswith("ppo_math.yaml")


def test_a_bad_recipe_exits_2_with_all_problems_on_stderr(rlcli):
    Path("bad.yaml").write_text("extends: sft_math\nsed: 1\ntrain: {stpes: 1}\n")
    code, out, err = rlcli("validate", "bad.yaml")
    assert (code, out) == (2, "")
    assert "error[R42] bad.yaml:2:1" in err
    assert "error[R42] bad.yaml:3:9" in err
    assert "Traceback" not in err
    code, out, _ = rlcli("validate", "bad.yaml", "--json")
    assert code == 2
    assert [p["where"] for p in json.loads(out)["problems"]] == ["bad.yaml:2:1", "bad.yaml:3:9"]
    assert "Traceback" in rlcli("--debug", "validate", "bad.yaml")[2]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["trian"], 2, "error[USAGE]"),
        (["plan"], 2, "error[USAGE]"),
        (["plan", "ppo_math", "--jsn"], 2, "error[USAGE]"),
        (["ls", "thing"], 2, "error[USAGE]"),
        (["plan", "no_such"], 2, "error[R51]"),
        (["show", "no_such"], 2, "error[R51]"),
        (["show", "interface", "ppo_acter"], 2, "error[R70]"),
        (["show", "interface", "a", "b"], 2, "error[USAGE]"),
        (["plan", "ppo_math", "steps"], 2, "error[R42] command line"),
        (["plan", "ppo_math", "models.actor.path=./gone"], 5, "error[MODEL] command line"),
        (["--project", "gone", "ls"], 2, "error[PROJECT]"),
    ],
)
def test_mistakes_have_an_exit_code_and_an_error_code(rlcli, arguments, code, message):
    exit_code, out, err = rlcli(*arguments)
    assert (exit_code, out) == (code, "")
    assert err.startswith(message)
    assert "Traceback" not in err


def test_plan_fits_80_columns_and_shows_the_arithmetic(rlcli):
    code, out, _ = rlcli(
        "plan", "ppo_math", "launch=local", "cluster.devices_per_node=2", "--graph"
    )
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines())
    for words in (
        "sft_math",
        "dp2",
        "0-1",
        "actor.train_step",
        "64 prompts x 4 responses = 256 sequences",
    ):
        assert words in out
    document = json.loads(
        rlcli("plan", "ppo_math", "launch=local", "cluster.devices_per_node=2", "--json")[1]
    )
    assert document["world_size"] == 2
    assert document["batch"]["sequences"] == 256
    assert document["stages"][0] == ["actor_gen"]
    assert {role["role"] for role in document["roles"]} == {"actor", "critic", "ref", "reward"}


def test_a_plan_of_one_of_each_has_no_plurals(rlcli):
    row, epoch = "train.prompts_per_step=1", ("train.steps=null", "train.epochs=1")
    _, out, _ = rlcli("plan", "sft_math", row, *epoch)
    assert "step: 1 epoch of 1 row\n" in out
    assert "1 sequence (1 per rank)" in out
    _, out, _ = rlcli("plan", "sft_math", row, "train.steps=1")
    assert "step: 1 step of 1 row\n" in out


def test_ls_lists_components_and_recipes(rlcli):
    code, out, _ = rlcli("ls")
    assert code == 0
    for name in ("ppo_actor", "fsdp", "arithmetic", "ppo_math", "base/ppo", "built-in"):
        assert name in out
    assert all(len(line) <= 80 for line in out.splitlines())
    document = json.loads(rlcli("ls", "recipes", "--json")[1])
    assert list(document) == ["recipes"]
    (entry,) = [e for e in document["recipes"] if e["name"] == "ppo_math"]
    assert entry["where"].endswith("recipes/ppo_math.yaml")
    assert entry["doc"]


def test_ls_shows_a_broken_component_instead_of_failing(rlcli, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "broken.py").write_text("def :\n")
    monkeypatch.delenv("RLCLI_PROJECT", raising=False)
    code, out, _ = rlcli("ls", "datasets")
    assert code == 0
    assert "broken" in out
    assert "not valid Python" in " ".join(out.split())


def test_show_prints_the_arguments_of_a_component(rlcli):
    for arguments in (["ppo_actor"], ["interface", "ppo_actor"]):
        code, out, _ = rlcli("show", *arguments)
        assert code == 0
        assert "eps_clip" in out
        assert "train_step" in out
    document = json.loads(rlcli("show", "ppo_actor", "--json")[1])
    (field,) = [arg for arg in document["args"] if arg["name"] == "eps_clip"]
    assert field["type"] == "float > 0 <= 1"
    assert field["doc"]


def test_a_critic_has_only_settings_of_its_own(rlcli):
    names = [arg["name"] for arg in json.loads(rlcli("show", "ppo_critic", "--json")[1])["args"]]
    assert len(names) <= 10
    assert not any(name.startswith(("generation", "kl_", "gae_")) for name in names)


def test_show_prints_a_recipe_with_origins(rlcli):
    code, out, _ = rlcli("show", "ppo_math", "ppo.kl_ctl=0.25")
    assert code == 0
    Path("again.yaml").write_text(out)
    assert rlcli("validate", "again.yaml")[0] == 0
    lines = rlcli("show", "ppo_math", "ppo.kl_ctl=0.25", "--origins")[1].splitlines()
    assert ["kl_ctl:", "0.25", "#", "command", "line"] in [line.split() for line in lines]
    document = json.loads(rlcli("show", "ppo_math", "ppo.kl_ctl=0.25", "--origins", "--json")[1])
    assert document["origins"]["graph.advantages.interface.args.kl_ctl"] == "command line"
    assert document["recipe"]["train"]["steps"] > 0


def test_interrupt_exits_130(rlcli, monkeypatch):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "app", interrupted)
    assert rlcli("ls") == (130, "", "")


LEAVING = '''
"""Rows that nobody gets to see."""

import sys
from dataclasses import dataclass

from rlcli.api.data import register_dataset

sys.exit(0)


@register_dataset("leaving")
@dataclass
class Leaving:
    util: object
'''


def test_a_component_that_exits_is_an_error(rlcli, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/leaving.py").write_text(LEAVING)
    (tmp_path / "mine.yaml").write_text("extends: sft_math\ndatasets: {train: {type: leaving}}\n")
    code, _, err = rlcli("check", "mine.yaml")
    assert code == 2
    assert f"{tmp_path}/datasets/leaving.py:9: SystemExit: 0" in err


def test_a_bug_exits_1_and_names_the_crash_report(rlcli, monkeypatch, tmp_path):
    def broken(*_args, **_options):
        raise ZeroDivisionError("x\x1b[31m")

    monkeypatch.setattr(command_line, "app", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = rlcli("ls")
    assert (code, out) == (1, "")
    assert err.startswith("error[BUG]")
    assert "\x1b" not in err
    (report,) = tmp_path.glob("rlcli-crash-*")
    assert str(report) in err
    assert report.stat().st_mode & 0o077 == 0
    assert "ZeroDivisionError" in report.read_text()


def test_a_bug_on_a_full_disk_is_still_reported(rlcli, monkeypatch):
    def broken(*_args, **_options):
        raise ZeroDivisionError

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command_line, "app", broken)
    monkeypatch.setattr("tempfile.mkstemp", full)
    code, out, err = rlcli("ls")
    assert (code, out) == (1, "")
    assert err.startswith(
        "error[BUG]: unexpected ZeroDivisionError\n  hint: this is a bug in rlcli; --debug before"
    )


def test_ranks_are_printed_as_ranges():
    assert ranks_text((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"


def test_tables_without_a_terminal_have_no_colour_and_are_escaped(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    print_table(["a", "b"], [["x", "\x1b[31mred"]], title="t")
    assert "\x1b" not in capsys.readouterr().out


# -- whole processes -------------------------------------------------------------------------------


def process(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


WITHOUT_HEAVY = [
    [],
    ["--help"],
    ["train", "--help"],
    ["validate", "ppo_math"],
    ["plan", "ppo_math"],
    ["ls"],
    ["show", "ppo_actor"],
    ["show", "ppo_math"],
    ["explain", "ppo_math", "ppo.kl_ctl"],
    ["diff", "ppo_math", "sft_math"],
    ["schema"],
    ["cp", "ppo_math", "mine.yaml", "--dry-run"],
    ["tokens", "sft_math"],
    ["status"],
    ["completion", "bash"],
    ["__complete", "zsh", "train", "ppo_math", "models.actor.backend.args."],
]


def test_no_heavy_library_is_loaded(assert_light):
    assert_light(WITHOUT_HEAVY)


def test_python_m_rlcli_runs_the_command_line(tmp_path):
    done = process("-m", "rlcli", "plan", "no_such", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error[R51]")


def test_the_return_value_of_a_verb_is_the_exit_code(rlcli, monkeypatch):
    def stopped(recipe: str) -> int:
        return 75

    monkeypatch.setattr(
        command_line, "app", command_line.typer.Typer(pretty_exceptions_enable=False)
    )
    command_line.app.command()(stopped)
    assert rlcli("ppo_math")[0] == 75


def test_validate_quiet_prints_only_errors(rlcli):
    assert rlcli("validate", "ppo_math", "--quiet") == (0, "", "")
    code, out, err = rlcli("validate", "ppo_math", "--quiet", "train.stepz=1")
    assert (code, out) == (2, "")
    assert "train.stepz" in err
