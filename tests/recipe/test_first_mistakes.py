"""Mistakes of the first hour: each is one error, with a hint that names what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcli.errors import RecipeError, RlcliError
from rlcli.recipe.resolve import load_recipe


def problems_of(recipe, *overrides, with_=()):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides, with_)
    return caught.value.problems


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=-3", "train.steps is -3; it must be at least 1"),
        ("ppo.eps_clip=-0.2", "ppo.eps_clip is -0.2; it must be above 0"),
        (
            "cluster.nodes=9999",
            "cluster.nodes is 9999; it must be at most 4096",
        ),
    ],
)
def test_a_number_out_of_bounds_is_named_with_its_bound(override, words):
    [problem] = problems_of("ppo_math", override)
    assert problem.what == words


def test_a_wrong_value_is_reported_once_though_references_carry_it():
    [problem] = problems_of("ppo_math", "generation.temperature=hot")
    assert problem.where == "command line"
    assert "found text 'hot'" in problem.what


@pytest.mark.parametrize("key", ["backend.args.lr=0.1", "mesh.tp=2", "path=some/model"])
def test_a_key_of_a_role_that_does_not_exist_is_one_error(key):
    [problem] = problems_of("sft_math", f"models.lm.{key}")
    assert (problem.what, problem.hint) == ("no call uses the role lm", "there is actor")


def test_a_misspelt_base_recipe_proposes_the_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: ppo_mth\n")
    [problem] = problems_of("mine.yaml")
    assert (problem.where, problem.hint) == ("mine.yaml:1:10", "did you mean ppo_math?")


def test_a_recipe_without_its_sections_proposes_a_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("seed: 3\n")
    [problem] = problems_of("mine.yaml")
    assert "datasets is required" in problem.what
    assert "extends: NAME" in problem.hint


def test_a_launcher_given_as_a_profile_proposes_the_key():
    [problem] = problems_of("ppo_math", with_=["slurm"])
    assert problem.hint == "it is a launcher: write launch=slurm"


def test_a_folder_given_as_a_recipe_is_called_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    [problem] = problems_of("mine")
    assert "not found (a folder, and" in problem.what
    Path("mine/status.json").write_text("{}")
    [problem] = problems_of("mine")
    assert problem.hint == "it is the folder of a run; to continue it: rlcli resume mine"


def test_a_missing_file_of_rows_is_not_taken_for_a_dataset_of_the_hub():
    with pytest.raises(RlcliError) as caught:
        load_recipe("ppo_gsm8k", ["datasets.train.args.path=data/nothing.jsonl"])
    assert "looked in the working directory" in caught.value.hint


def test_an_override_in_place_of_the_recipe_is_recognised():
    [problem] = problems_of("train.steps=3")
    assert problem.hint == "the recipe comes before its overrides: RECIPE train.steps=3"
