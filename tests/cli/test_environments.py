"""Environments are components like all others: listed, shown, created, checked in recipes."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

GUESS = "graph.actor_gen.interface.args."


def test_environments_are_listed_but_not_as_interfaces(rlcli):
    listed = json.loads(rlcli("ls", "--json")[1])
    assert {"calculator", "guess"} <= {each["name"] for each in listed["environments"]}
    assert "calculator" not in {each["name"] for each in listed["interfaces"]}


def test_an_environment_is_shown_with_its_tools(rlcli):
    assert json.loads(rlcli("show", "calculator", "--json")[1])["tools"] == ["calculate"]
    assert "tools: calculate\n" in rlcli("show", "environment", "calculator")[1]


def test_tools_that_are_known_where_it_is_played_are_not_shown(rlcli):
    assert json.loads(rlcli("show", "mcp", "--json")[1])["tools"] is None
    assert "tools: those that it states where it is played\n" in rlcli("show", "mcp")[1]


@pytest.mark.skipif(importlib.util.find_spec("mcp") is not None, reason="mcp is installed")
def test_an_environment_whose_library_is_missing_says_how_to_install_it(rlcli):
    server = (f"{GUESS}environment=mcp", f"{GUESS}environment_args.command=[server]")
    for arguments in (("validate", "grpo_calculator", *server), ("test", "environment", "mcp")):
        code, _, err = rlcli(*arguments)
        assert code == 6
        assert "environment mcp needs mcp<3,>=2, which is not installed" in err
        assert "pip install 'rlcli[mcp]'" in err


def test_a_new_environment_passes_its_test(rlcli, tmp_path):
    rlcli("new", "project", "mine")
    code, _, err = rlcli("--project", "mine", "new", "environment", "my-env")
    assert code == 0, err
    assert "my-env" in {
        each["name"].replace("_", "-")
        for each in json.loads(rlcli("--project", "mine", "ls", "environments", "--json")[1])[
            "environments"
        ]
    }
    code, out, _ = rlcli("--project", "mine", "test", "environment", "my-env")
    assert code == 0, out
    assert "test_my_env.py: " in out
    assert "FAIL" not in out


@pytest.mark.parametrize(
    "recipe",
    [
        ("grpo_math",),
        ("grpo_guess",),
        ("ppo_math",),
        ("grpo", "--model", "some/model", "--data", "rows.jsonl"),
    ],
    ids=lambda recipe: recipe[0],
)
def test_the_layer_of_a_new_environment_fits_recipes_that_have_a_reward(rlcli, tmp_path, recipe):
    rlcli("new", "project", "mine")
    os.chdir("mine")
    rlcli("new", "environment", "my-env")
    (tmp_path / "mine" / "rows.jsonl").write_text('{"prompt": "How many?", "answer": "2"}\n')
    with_layer = (*recipe, "--with", "environments/my-env")
    code, out, err = rlcli("validate", *with_layer)
    assert code == 0, out + err
    resolved = json.loads(rlcli("show", *with_layer, "--json")[1])["recipe"]
    players = resolved["graph"]["actor_gen"], resolved["train"]["eval"]["graph"]["eval_gen"]
    for player in players:
        interface = player["interface"]
        assert (interface["type"], interface["args"]["environment"]) == ("episodes", "my-env")
    assert resolved["train"]["eval"]["graph"].get("eval_reward") is None


@pytest.mark.long
def test_environments_of_a_project_are_tested_without_torch(tmp_path):
    code = """
import contextlib, sys
from rlcli.cli.main import main
with contextlib.suppress(SystemExit):
    main(sys.argv[1:])
assert "torch" not in sys.modules
"""

    def rlcli(*arguments):
        command = [sys.executable, "-c", code, *arguments]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    rlcli("new", "project", "mine")
    rlcli("--project", "mine", "new", "environment", "dice")
    assert json.loads(rlcli("--project", "mine", "test", "environment", "dice", "--json"))["ok"]


@pytest.mark.parametrize(
    ("override", "message", "points_at"),
    [
        ("environment=gues", "no environment is named 'gues'; did you mean 'guess'?", "gues"),
        ("environment_args.highst=3", "environment guess: highst: Extra inputs", "highst"),
        ("environment_args.highest=0", "greater than or equal to 1", "highest=0"),
        ("environment=calculator", "calculator has neither score() nor step()", "scored"),
        ("max_turns=0", "max_turns is 0; it must be at least 1", "max_turns=0"),
    ],
)
def test_a_recipe_names_an_environment_and_its_arguments(rlcli, override, message, points_at):
    assert rlcli("validate", "grpo_guess")[0] == 0
    code, _, err = rlcli("validate", "grpo_guess", f"{GUESS}{override}")
    assert code == 2
    assert message in err
    assert points_at in err


def test_a_recipe_may_leave_out_how_turns_are_sampled(rlcli, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "extends: grpo_guess\n"
        "graph:\n  actor_gen:\n    interface:\n"
        "      args: {_replace_: true, environment: guess, scored: true}\n"
    )
    code, out, err = rlcli("check", "mine.yaml")
    assert "BUG" not in out + err
    assert code == 0, out + err


def test_a_file_that_would_hide_the_environments_is_refused(rlcli, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "interfaces").mkdir()
    (tmp_path / "interfaces" / "environments.py").write_text("")
    code, _, err = rlcli("ls", "interfaces")
    assert code != 0
    assert "would hide the folder interfaces/environments" in err
