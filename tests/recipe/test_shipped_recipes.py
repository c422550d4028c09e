"""The recipes that come with rlcli: sound, minimal, said what they are for,
and every algorithm has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcli import registry
from rlcli.errors import RecipeError
from rlcli.recipe.introspection.minimal import superfluous
from rlcli.recipe.parsing.finding import find_recipe
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.resolve import load_recipe
from rlcli.topology.report import make_plan

RECIPES = Path(__file__).parents[2] / "recipes"
WHOLE = sorted(path.stem for path in RECIPES.glob("*.yaml"))
PROFILES = sorted(path.stem for path in (RECIPES / "profiles").glob("*.yaml"))
EVERY_FILE = sorted(path.relative_to(RECIPES).as_posix() for path in RECIPES.rglob("*.yaml"))
ALGORITHMS = dict.fromkeys(
    ("dapo", "dppo", "dr_grpo", "gspo", "icepop", "maxrl", "mis", "rloo", "sapo"), "grpo"
)
"""Profiles that are settings of one algorithm, for the recipes whose names begin with it."""
OF_SOME = {**ALGORITHMS, "async": "ppo", "async_grpo": "grpo", "judge": "grpo"} | dict.fromkeys(
    ("sglang", "vllm"), "ppo"
)
JUDGE = (
    "models.judge={scratch: {model_type: llama, hidden_size: 8, intermediate_size: 8, "
    "num_hidden_layers: 1, num_attention_heads: 1}, tokenizer: builtin:arithmetic}"
)
ROLE = dict.fromkeys(("sft", "dpo", "kto", "grpo", "ppo"), "actor") | {"reward": "reward"}
"""The recipes for any model, and the role that has it."""
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
NEEDED_BY = {
    "judge": (JUDGE,),
    "sglang": ("models.actor.rollout.backend.args.urls=['http://h:1']",),
    "vllm": ("models.actor.rollout.backend.args.urls=['http://h:1']",),
}
"""What a user must set for a profile."""
SELF_SCORED = ("grpo_guess",)
"""Recipes whose environment gives the rewards: they have no role for them, which these profiles
need."""
WITH_EVERY_PROFILE = ("sft_math", "dpo_arithmetic", "grpo_math", "ppo_math")
"""Recipes whose combinations with profiles do not count as exhaustive."""


def _marks_of(recipe: str, profile: str | None) -> list[pytest.MarkDecorator]:
    is_usual = profile is None or recipe in WITH_EVERY_PROFILE
    return [] if is_usual else [pytest.mark.exhaustive]


SETUPS = [
    pytest.param(recipe, profile, marks=_marks_of(recipe, profile))
    for recipe in WHOLE
    for profile in (None, *PROFILES)
    if recipe.startswith(OF_SOME.get(profile, ""))
    and not (recipe in SELF_SCORED and profile in ("dapo", "judge"))
]


@pytest.fixture
def needed(tmp_path, monkeypatch) -> dict[str, tuple[str, ...]]:
    """What a user must say for each recipe: where the data are, and for some the model. In an
    empty working directory."""
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "train.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    path = f"datasets.train.args.path={rows}"
    needed = {recipe: (path,) if recipe.endswith(("_qwen", "_chat")) else () for recipe in WHOLE}
    needed |= {recipe: (path, f"models.{ROLE[recipe]}.path={MODEL}") for recipe in ROLE}
    return needed


@pytest.mark.parametrize(("recipe", "profile"), SETUPS)
def test_every_recipe_can_be_planned_alone_and_with_every_profile(recipe, profile, needed):
    of_profile = NEEDED_BY.get(profile, ())
    resolved = load_recipe(recipe, (*needed[recipe], *of_profile), [profile] if profile else [])
    plan = make_plan(resolved)
    assert plan.topology.world_size == (8 if profile == "gpu8" else 1)
    assert set(plan.topology.roles_on(0)) == set(resolved.recipe.models)
    if profile and profile not in OF_SOME:
        assert resolved.recipe.cluster.device == "cuda"


@pytest.mark.parametrize("profile", ALGORITHMS)
def test_a_profile_of_an_algorithm_has_at_most_six_lines(profile):
    """two of comment, and what differs"""
    assert len((RECIPES / "profiles" / f"{profile}.yaml").read_text().splitlines()) <= 6


def test_a_missing_data_path_is_reported_with_the_option_that_gives_it(needed):
    with_data = [recipe for recipe in WHOLE if needed[recipe]]
    assert with_data
    for recipe in with_data:
        with pytest.raises(RecipeError) as caught:
            load_recipe(recipe, needed[recipe][1:])
        (problem,) = caught.value.problems
        assert problem.what == "datasets.train.args.path is required"
        layer = Path(problem.where.split(":")[0]).stem
        assert layer in (recipe, *ROLE)
        assert "--data" in problem.hint


def test_every_algorithm_has_recipes_for_a_laptop_and_for_gpus(needed):
    trained_by = {
        recipe: _training_interfaces(load_recipe(recipe, needed[recipe]).recipe) for recipe in WHOLE
    }
    algorithms = {
        name
        for name in registry.names("interfaces")
        if "train_step" in registry.signature("interfaces", name).methods
    }
    assert algorithms
    for algorithm in algorithms:
        recipes = [recipe for recipe, interfaces in trained_by.items() if algorithm in interfaces]
        on_gpus = {recipe for recipe in recipes if recipe.endswith(("_gsm8k", "_qwen", "_chat"))}
        assert set(recipes) - on_gpus, f"{algorithm}: no recipe for a laptop"
        assert on_gpus, f"{algorithm}: no recipe for GPUs"
    assert {"gpu1", "gpu8"} <= set(PROFILES)


def _training_interfaces(recipe) -> set[str]:
    return {call.interface.type for call in recipe.graph.values() if call.call == "train_step"}


def test_ppo_starts_from_the_model_of_sft():
    assert load_recipe("ppo_math").recipe.models["actor"].path == "recipe:sft_math#actor"


@pytest.mark.parametrize(
    ("recipe", "call"), [("sft", "eval_sft"), ("dpo", "eval_pairs"), ("kto", "eval_answers")]
)
def test_an_evaluation_without_responses_needs_only_the_name_of_a_dataset(recipe, call, needed):
    held_out = "datasets.held_out={type: hf, args: {path: train.jsonl}}"
    overrides = [*needed[recipe], held_out, "train.eval.dataset=held_out"]
    assert load_recipe(recipe, overrides).recipe.train.eval.graph[call].call == "evaluate"


@pytest.mark.parametrize("file", EVERY_FILE)
def test_every_recipe_begins_with_its_purpose_and_its_needs(file):
    does, needs, after = (RECIPES / file).read_text().splitlines()[:3]
    assert does.startswith("# ")
    assert does.rstrip().endswith(".")
    assert needs.startswith("# Needs: ")
    assert not after.startswith("#")
    assert max(len(line) for line in (RECIPES / file).read_text().splitlines()) <= 120


# -- minimal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_has_no_superfluous_values(profile, needed):
    recipe = f"{OF_SOME.get(profile, 'ppo')}_gsm8k"
    resolved = load_recipe(recipe, (*needed[recipe], *NEEDED_BY.get(profile, ())), [profile])
    assert superfluous(resolved, resolved.layers[-1]) == []


def test_a_superfluous_value_is_reported_with_its_line(tmp_path, needed):
    text = (RECIPES / "sft_gsm8k.yaml").read_text()
    file = tmp_path / "mine.yaml"
    file.write_text(text + "seed: 1\nlog:\n  plot: true\n")
    line = len(text.splitlines()) + 1
    resolved = load_recipe(file, needed["sft_gsm8k"])
    redundant = superfluous(resolved, resolved.layers[-1])
    assert [(value.key, value.mark.line) for value in redundant] == [
        ("seed", line),
        ("log", line + 1),
    ]


def test_a_value_that_an_override_replaces_is_not_superfluous(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("extends: sft_math\ntrain:\n  steps: 5\nseed: 2\n")
    resolved = load_recipe(file, ["train.steps=7"])
    assert superfluous(resolved, resolved.layers[-1]) == []


def test_an_item_of_a_list_can_be_superfluous(tmp_path):
    (tmp_path / "below.yaml").write_text("extends: sft_math\ncheckpoint:\n  roles: [actor]\n")
    file = tmp_path / "mine.yaml"
    file.write_text("extends: below\ncheckpoint:\n  roles: [actor]\n")
    resolved = load_recipe(file)
    assert [value.key for value in superfluous(resolved, resolved.layers[-1])] == ["checkpoint"]


def test_shipped_recipes_are_found_by_name():
    problems = Problems()
    for recipe in WHOLE:
        assert find_recipe(recipe, problems) == RECIPES / f"{recipe}.yaml"
    assert not problems.reported
