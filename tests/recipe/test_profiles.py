"""`--with`: layers from the command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlcli.errors import RecipeError
from rlcli.recipe.parsing.finding import profile_names, recipe_names, whole_recipe_names
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.warm_start import warm_starts


def refused(*arguments) -> list[tuple[str, str | None]]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(*arguments)
    return [(problem.code, problem.where) for problem in caught.value.problems]


def test_profiles_win_over_the_recipe_and_overrides_over_profiles(folder: Path):
    (folder / "a.yaml").write_text("seed: 7\nlog: {dir: a, plot: false}\n")
    (folder / "b.yaml").write_text("log: {dir: b}\ntrain: {steps: 8}\n")
    resolved = load_recipe("small", ["train.steps=9"], ["a", "b.yaml"])
    recipe = resolved.recipe
    assert (recipe.seed, recipe.log.dir, recipe.log.plot, recipe.train.steps) == (7, "b", False, 9)
    assert load_recipe("small", (), ["b", "a"]).recipe.log.dir == "a"
    assert [layer.label for layer in resolved.layers] == ["small.yaml", "a.yaml", "b.yaml"]
    assert resolved.profiles == ("a", "b.yaml")
    assert [(str(s.mark), s.value) for s in resolved.history("train.steps")] == [
        ("small.yaml:14:10", 3),
        ("b.yaml:2:16", 8),
        ("command line", 9),
    ]


def test_the_recipe_keeps_its_own_name_and_file(folder: Path):
    (folder / "p.yaml").write_text("seed: 7\n")
    resolved = load_recipe("small", (), ["p"])
    assert (resolved.path.name, resolved.recipe.name) == ("small.yaml", "small")
    assert load_recipe("small", (), []).recipe.name == "small"


def test_a_profile_may_extend_other_layers(folder: Path):
    (folder / "deep.yaml").write_text("seed: 7\nlog: {dir: deep}\n")
    (folder / "p.yaml").write_text("extends: [deep, small]\nlog: {dir: p}\n")
    resolved = load_recipe("small", (), ["p"])
    assert [layer.label for layer in resolved.layers] == ["small.yaml", "deep.yaml", "p.yaml"]
    assert (resolved.recipe.seed, resolved.recipe.log.dir) == (7, "p")


def test_shipped_profiles_are_found_by_name(folder: Path):
    resolved = load_recipe("ppo_math", (), ["gpu8"])
    assert resolved.recipe.cluster.devices_per_node == 8
    assert resolved.layers[-1].label == "profiles/gpu8.yaml"
    assert load_recipe("ppo_math", (), ["profiles/gpu8"]).recipe == resolved.recipe


def test_a_users_file_takes_precedence_over_a_shipped_profile(folder: Path):
    (folder / "gpu8.yaml").write_text("seed: 8\n")
    assert load_recipe("small", (), ["gpu8"]).recipe.seed == 8


def test_a_profile_may_be_any_file(folder: Path, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "with space.yaml"
    elsewhere.write_text("seed: 9\n")
    assert load_recipe("small", (), [str(elsewhere)]).recipe.seed == 9
    assert load_recipe("small", (), [os.path.relpath(elsewhere)]).recipe.seed == 9


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("extends: gone\n", ("R51", "p.yaml:1:10")),
        ("extends: /etc/passwd\n", ("R55", "p.yaml:1:10")),
        ("extends: p\n", ("R52", "p.yaml:1:10")),
        ("seed: 1\nseed: 2\n", ("R05", "p.yaml:2:1")),
        ("cluster: {nodez: 3}\n", ("R42", "p.yaml:1:11")),
        ("train: {epochs: 3}\n", ("R47", "p.yaml:1:17")),
        ("- a\n", ("R02", "p.yaml:1:1")),
    ],
)
def test_problems_of_a_profile_name_its_line_and_the_option(folder: Path, text, problem):
    (folder / "p.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe("small", (), ["p"])
    assert [(p.code, p.where) for p in caught.value.problems] == [problem]
    assert "pulled in by --with p" in str(caught.value)


def test_the_chain_of_a_problem_includes_the_profile(folder: Path):
    (folder / "deep.yaml").write_text("sed: 1\n")
    (folder / "p.yaml").write_text("extends: deep\n")
    with pytest.raises(RecipeError, match=r"pulled in by p\.yaml:1, --with p"):
        load_recipe("small", (), ["p"])


def test_a_layer_given_twice_is_refused(folder: Path):
    (folder / "p.yaml").write_text("seed: 1\n")
    assert refused("small", (), ["p", "p.yaml"]) == [("R05", "--with p.yaml")]
    assert refused("small", (), ["small"]) == [("R05", "--with small")]
    assert refused("ppo_math", (), ["base/ppo"]) == [("R05", "--with base/ppo")]


def test_all_missing_profiles_are_reported_together(folder: Path):
    assert refused("small", ["seed=.nan"], ["gpu9", "zzz"]) == [
        ("R51", "--with gpu9"),
        ("R51", "--with zzz"),
        ("R34", "command line"),
    ]
    with pytest.raises(RecipeError, match="did you mean gpu8") as caught:
        load_recipe("small", (), ["gpu9"])
    assert len(caught.value.problems) == 1


def test_a_profile_cannot_be_trained_as_a_recipe(folder: Path):
    assert "gpu8" in profile_names()
    assert not [name for name in whole_recipe_names() if "gpu8" in name or name.startswith("base/")]
    assert set(whole_recipe_names()) < set(recipe_names())
    with pytest.raises(RecipeError, match="--with gpu8"):
        load_recipe("gpu8")


def test_profiles_and_overrides_do_not_apply_to_the_warm_start(folder: Path):
    (folder / "p.yaml").write_text("seed: 77\n")
    (start,) = warm_starts(load_recipe("ppo_math", ["log.dir=elsewhere"], ["p"]))
    assert (start.source.recipe.seed, start.source.recipe.log.dir) == (1, "runs")
    assert start.source.profiles == ()


@pytest.mark.parametrize("name", ["my-reward", "my_reward", "my-rewar"])
def test_a_layer_in_a_folder_of_layers_is_hinted_at(folder: Path, name: str):
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    (folder / "recipes" / "rewards").mkdir(parents=True)
    (folder / "recipes" / "rewards" / "my-reward.yaml").write_text("seed: 7\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("small", (), [name])
    assert caught.value.problems[0].hint == "did you mean rewards/my-reward?"
