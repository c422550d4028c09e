"""The recipes that come with rlcli: sound, minimal, said what they are for, and every algorithm has one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcli import registry
from rlcli.errors import RecipeError
from rlcli.recipe.layers import find_recipe
from rlcli.recipe.problems import Problems
from rlcli.recipe.reader import parse
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.tree import Listing, Mapping, Node, dotted, key_mark, plain
from rlcli.recipe.write import to_yaml
from rlcli.topology.report import make_plan

RECIPES = Path(__file__).parents[2] / "recipes"
WHOLE = sorted(path.stem for path in RECIPES.glob("*.yaml"))
PROFILES = sorted(path.stem for path in (RECIPES / "profiles").glob("*.yaml"))
EVERY_FILE = sorted(path.relative_to(RECIPES).as_posix() for path in RECIPES.rglob("*.yaml"))
SETUPS = [(recipe, profile) for recipe in WHOLE for profile in (None, *PROFILES)]


@pytest.fixture
def needed(tmp_path, monkeypatch) -> dict[str, tuple[str, ...]]:
    """What a user must say for each recipe: where the data are. In an empty working directory."""
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "train.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    path = f"datasets.train.args.path={rows}"
    return {recipe: (path,) if recipe.endswith("_gsm8k") else () for recipe in WHOLE}


@pytest.mark.parametrize(("recipe", "profile"), SETUPS)
def test_every_recipe_loads_and_plans_alone_and_with_every_profile(recipe, profile, needed):
    resolved = load_recipe(recipe, needed[recipe], [profile] if profile else [])
    plan = make_plan(resolved)
    assert plan.topology.world_size == (8 if profile == "gpu8" else 1)
    assert set(plan.topology.roles_on(0)) == set(resolved.recipe.models)
    if profile:
        assert resolved.recipe.cluster.device == "cuda"


def test_what_a_user_must_set_is_asked_for_where_it_belongs(needed):
    with_data = [recipe for recipe in WHOLE if needed[recipe]]
    assert with_data
    for recipe in with_data:
        with pytest.raises(RecipeError) as caught:
            load_recipe(recipe)
        (problem,) = caught.value.problems
        assert problem.what == "datasets.train.args.path is required"
        assert problem.where.split(":")[0].endswith(f"{recipe}.yaml")
        assert "datasets.train.args.path=" in problem.excerpt


def test_every_algorithm_has_recipes_for_a_laptop_and_for_gpus(needed):
    trained_by = {recipe: _training_interfaces(load_recipe(recipe, needed[recipe]).recipe) for recipe in WHOLE}
    algorithms = {
        name for name in registry.names("interfaces") if "train_step" in registry.signature("interfaces", name).methods
    }
    assert algorithms
    for algorithm in algorithms:
        recipes = [recipe for recipe, interfaces in trained_by.items() if algorithm in interfaces]
        assert any(not needed[recipe] for recipe in recipes), f"{algorithm}: no recipe for a laptop"
        assert any(needed[recipe] for recipe in recipes), f"{algorithm}: no recipe for GPUs"
    assert {"gpu1", "gpu8"} <= set(PROFILES)


def _training_interfaces(recipe) -> set[str]:
    return {call.interface.type for call in recipe.graph.values() if call.call == "train_step"}


def test_ppo_starts_from_what_sft_has_made():
    assert load_recipe("ppo_math").recipe.models["actor"].path == "recipe:sft_math#actor"


@pytest.mark.parametrize("file", EVERY_FILE)
def test_every_recipe_opens_with_what_it_does_and_what_it_needs(file):
    does, needs, after = (RECIPES / file).read_text().splitlines()[:3]
    assert does.startswith("# ")
    assert does.rstrip().endswith(".")
    assert needs.startswith("# Needs: ")
    assert not after.startswith("#")
    assert max(len(line) for line in (RECIPES / file).read_text().splitlines()) <= 120


# -- minimal ---------------------------------------------------------------------------------------------


def _places(node: Node, path: tuple = ()) -> Iterator[tuple]:
    """Every key and every item of a list."""
    if isinstance(node, Mapping):
        for key, entry in node.entries.items():
            yield (*path, key)
            yield from _places(entry.node, (*path, key))
    elif isinstance(node, Listing):
        for index, item in enumerate(node.items):
            yield (*path, index)
            yield from _places(item, (*path, index))


def _without(value, path):
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = _without(copy[path[0]], path[1:])
    return copy


def _superfluous(file: Path, load) -> list[str]:
    """`file:line: key` of everything that `load()` does not need `file` for; `file` is written anew meanwhile."""
    text = file.read_text()
    problems = Problems()
    tree = parse(text, file.name, problems)
    assert not problems.found
    whole, found = load().to_json(), []
    try:
        for path in _places(tree):
            file.write_text(to_yaml(_without(plain(tree), path)))
            try:
                same = load().to_json() == whole
            except RecipeError:
                same = False
            if same:
                mark = key_mark(tree, path)
                found.append(f"{file.name}:{mark.line if mark else '?'}: {dotted(path)}")
    finally:
        file.write_text(text)
    return found


@pytest.fixture
def copies(tmp_path) -> Path:
    """The recipes, to be changed."""
    return Path(shutil.copytree(RECIPES, tmp_path / "copies"))


@pytest.mark.parametrize("recipe", WHOLE)
def test_a_recipe_says_nothing_that_its_parents_or_the_defaults_say(recipe, copies, needed):
    file = copies / f"{recipe}.yaml"
    assert _superfluous(file, lambda: load_recipe(file, needed[recipe])) == []


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_says_nothing_that_the_defaults_say(profile, copies, needed):
    file = copies / "profiles" / f"{profile}.yaml"
    assert _superfluous(file, lambda: load_recipe("ppo_gsm8k", needed["ppo_gsm8k"], [str(file)])) == []


def test_a_superfluous_value_is_found_with_its_line(copies, needed):
    file = copies / "sft_gsm8k.yaml"
    file.write_text(file.read_text() + "seed: 1\nlog:\n  plot: true\n")
    line = len(file.read_text().splitlines())
    found = _superfluous(file, lambda: load_recipe(file, needed["sft_gsm8k"]))
    assert found == [f"sft_gsm8k.yaml:{line - 2}: seed", f"sft_gsm8k.yaml:{line - 1}: log",
                     f"sft_gsm8k.yaml:{line}: log.plot"]  # fmt: skip


def test_the_shipped_recipes_are_those_that_names_find():
    problems = Problems()
    for recipe in WHOLE:
        assert find_recipe(recipe, problems) == RECIPES / f"{recipe}.yaml"
    assert not problems.found
