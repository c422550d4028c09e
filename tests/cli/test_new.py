"""`rlcli new` reports the files that it writes and the next command."""

import json
import os
from pathlib import Path

import pytest
import typer

from rlcli.cli.candidates import candidates
from rlcli.cli.main import app
from rlcli.testing.subjects import names


@pytest.fixture
def project(rlcli, tmp_path):
    assert rlcli("new", "project", "mine")[0] == 0
    os.chdir(tmp_path / "mine")
    return tmp_path / "mine"


def test_a_new_project_has_a_valid_recipe(rlcli, tmp_path):
    code, out, err = rlcli("new", "project", "mine")
    assert code == 0
    assert "mine/recipes/first.yaml" in out
    assert "next: cd mine && rlcli train first" in err
    os.chdir("mine")
    assert not list(Path().rglob("__init__.py"))
    assert rlcli("validate", "first")[0] == 0
    listed = json.loads(rlcli("ls", "recipes", "--json")[1])["recipes"]
    assert [recipe["name"] for recipe in listed if recipe["home"] == "project"] == ["first"]


def test_a_new_dataset_has_a_recipe_layer_and_a_test(rlcli, project):
    code, out, err = rlcli("new", "dataset", "my-dataset")
    assert code == 0
    files = [
        "datasets/my_dataset.py",
        "tests/datasets/test_my_dataset.py",
        "recipes/data/my-dataset.yaml",
    ]
    for file in files:
        assert file in out
        assert Path(file).is_file()
    assert max(map(len, out.splitlines())) <= 80
    assert "next: rlcli test dataset my-dataset" in err
    Path("my-dataset.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n' * 64)
    assert rlcli("validate", "ppo_math", "--with", "data/my-dataset")[0] == 0
    Path("mine.yaml").write_text("extends: [ppo_math, data/my-dataset]\n")
    assert rlcli("validate", "mine.yaml")[0] == 0
    assert "my-dataset" in rlcli("show", "mine.yaml")[1]
    assert "prompt_key" in rlcli("show", "dataset", "my-dataset")[1]


def test_a_new_reward_replaces_that_of_a_recipe(rlcli, project):
    assert rlcli("new", "reward", "brevity")[0] == 0
    assert rlcli("validate", "ppo_math", "--with", "rewards/brevity")[0] == 0
    assert "brevity" in rlcli("show", "ppo_math", "--with", "rewards/brevity")[1]


def test_layers_of_new_components_are_no_recipes_to_train(rlcli, project):
    for kind in ("dataset", "environment", "reward"):
        assert rlcli("new", kind, f"my-{kind}")[0] == 0
    assert [name for name in names("recipe") if "my-" in name] == []


def test_a_new_recipe_is_valid(rlcli, project):
    assert "next: rlcli test recipe closer" in rlcli("new", "recipe", "closer")[2]
    assert rlcli("validate", "closer")[0] == 0


def test_a_dry_run_writes_no_files(rlcli, project):
    before = sorted(project.rglob("*"))
    code, out, err = rlcli("new", "dataset", "my-dataset", "--dry-run")
    assert code == 0
    assert "datasets/my_dataset.py" in out
    assert "nothing was written" in err
    document = json.loads(rlcli("new", "dataset", "my-dataset", "--dry-run", "--json")[1])
    assert document["written"] is False
    assert "class MyDataset" in document["files"][0]["text"]
    assert sorted(project.rglob("*")) == before


def test_an_existing_file_is_not_overwritten(rlcli, project):
    assert rlcli("new", "dataset", "my-dataset")[0] == 0
    for options in ((), ("--dry-run",)):
        code, out, err = rlcli("new", "dataset", "my-dataset", *options)
        assert (code, out) == (2, "")
        assert err.startswith("error[R68]")
        assert "my_dataset.py already exists" in err


def test_without_a_project_the_command_to_create_one_is_shown(rlcli):
    code, out, err = rlcli("new", "dataset", "my-dataset")
    assert (code, out) == (2, "")
    assert "rlcli new project" in err
    assert list(Path().iterdir()) == []


def test_outside_the_project_the_next_command_starts_with_cd(rlcli, project, tmp_path, monkeypatch):
    os.chdir(tmp_path)
    monkeypatch.setenv("RLCLI_PROJECT", "mine")
    code, out, err = rlcli("new", "interface", "grpo2")
    assert code == 0
    assert "mine/interfaces/grpo2.py" in out
    assert "next: cd mine && rlcli test interface grpo2" in err


@pytest.mark.parametrize(
    "arguments", [("datset", "x"), ("dataset",), ("dataset", "X"), ("project", "a b")]
)
def test_invalid_arguments_are_refused(rlcli, project, arguments):
    code, out, err = rlcli("new", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error[")


def test_kinds_are_completed():
    typed = candidates(typer.main.get_command(app), ["new", "re"])
    assert {candidate.text for candidate in typed} == {"recipe", "reward"}
