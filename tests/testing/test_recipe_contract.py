"""The recipe contract: shipped recipes pass it without their models, rows and machines;
broken ones do not."""

from __future__ import annotations

import pytest

from rlcli.recipe.resolve import load_recipe
from rlcli.testing.results import exit_code
from rlcli.testing.runner import run_checks
from rlcli.testing.smoke import make_small
from rlcli.testing.subjects import subjects

ROWS_FIT = "its own rows fit, and none that is held out is trained on"
STARTS_UNDECIDED = "a model from scratch finds all tokens about equally likely at first"
REWARDS_MATTER = "what is learned from rewards changes with them"
OF_EACH_ALGORITHM = ("sft_math", "rm_arithmetic", "dpo_arithmetic", "kto_arithmetic", "ppo_math",
                     "grpo_guess", "distill_math", "best_of_n_math")  # fmt: skip


class Silent:
    def limited(self, words, seconds): ...
    def component(self, subject, checks): ...
    def begin(self, words): ...
    def end(self, check): ...
    def done(self, tested): ...


@pytest.fixture
def examine(tmp_path, monkeypatch):
    """Write a recipe and check its contract: words of a check → its outcome, and the failures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCLI_PROJECT", raising=False)

    def examined(text, *overrides):
        (tmp_path / "mine.yaml").write_text(text)
        (tested,) = run_checks(subjects("recipe", "mine.yaml", overrides), Silent())
        failures = [check.failure for check in tested.checks if check.failure is not None]
        return {check.words: check.outcome for check in tested.checks}, failures

    return examined


@pytest.fixture
def of_built_in(tmp_path, monkeypatch):
    """The contracts of built-in recipes, of which none may fail."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # no tokenizer is on this machine

    def examined(*names):
        chosen = [subject for subject in subjects("recipe") if not names or subject.name in names]
        tested = run_checks(chosen, Silent())
        assert [check for one in tested for check in one.checks if check.outcome == "FAIL"] == []
        assert exit_code(tested) == 0
        assert list(tmp_path.iterdir()) == []
        return tested

    return examined


@pytest.mark.long
def test_a_recipe_of_each_algorithm_passes_its_contract(of_built_in):
    assert len(of_built_in(*OF_EACH_ALGORITHM)) == len(OF_EACH_ALGORITHM)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)  # two minutes of work on one core
def test_every_shipped_recipe_passes_its_contract(of_built_in):
    tested = of_built_in()
    assert {one.subject.name for one in tested} >= {*OF_EACH_ALGORITHM, "sft_gsm8k", "ppo_gsm8k"}
    skipped = {check.words for one in tested for check in one.checks if check.outcome == "skip"}
    assert skipped == {ROWS_FIT, STARTS_UNDECIDED, REWARDS_MATTER}


def test_an_invalid_recipe_is_reported_once(examine):
    outcomes, (failure,) = examine("extends: sft_math\ntrain:\n  stepps: 5\n")
    assert "unknown key" in failure.finding
    assert failure.where == "mine.yaml:3:3"
    assert set(outcomes.values()) == {"FAIL", "skip"}


def test_a_superfluous_value_is_reported_with_its_line(examine):
    outcomes, (failure,) = examine("extends: sft_math\ntrain:\n  steps: 1200\n")
    assert outcomes["it repeats nothing that its parents or the defaults say"] == "FAIL"
    assert (failure.finding, failure.where) == (
        "the recipe is the same without train (line 2)",
        "mine.yaml:2",
    )


def test_a_warm_start_from_a_missing_role_is_reported(examine):
    outcomes, failures = examine(
        "extends: ppo_math\nmodels:\n  actor:\n    path: recipe:sft_math#critic\n"
    )
    assert outcomes["its roles fit on its devices; its warm starts are valid"] == "FAIL"
    assert "sft_math saves no role 'critic'" in failures[0].finding
    assert failures[0].where == "mine.yaml:4:11"


def test_a_graph_that_fails_at_run_time_is_reported(examine):
    text = (
        "extends: sft_math\nmodels:\n  actor:\n    backend:\n      args:\n        lr: 1e38\n   "
        "     warmup_steps: 0\n"
    )
    outcomes, failures = examine(text)
    assert "FAIL" in (
        outcomes["two steps run, with tiny models and a few rows"],
        outcomes["losses, gradients and rewards are finite"],
    )
    assert failures


def test_held_out_rows_that_are_trained_on_are_reported(examine):
    text = "extends: grpo_math\ndatasets:\n  held_out: {args: {held_out: false}}\n"
    outcomes, (failure,) = examine(text)
    assert outcomes[ROWS_FIT] == "FAIL"
    assert failure.finding == "held-out rows: 200 of 200 prompts of held_out are in train too"
    assert failure.where == "mine.yaml:3"


def test_a_model_that_starts_with_firm_beliefs_is_reported(examine):
    text = "extends: sft_math\nmodels:\n  actor: {scratch: {initializer_range: 0.6}}\n"
    outcomes, (failure,) = examine(text)
    assert outcomes[STARTS_UNDECIDED] == "FAIL"
    assert "over 380 tokens" in failure.finding
    assert failure.where == "mine.yaml:3"


def test_learning_that_does_not_depend_on_rewards_is_reported(examine):
    outcomes, (failure,) = examine(
        "extends: best_of_n_math\ngraph:\n  actor_train:\n    interface:\n"
        "      args: {keep: best, best: 8}\n"
    )
    assert outcomes["what is learned from rewards changes with them"] == "FAIL"
    assert failure.finding == "actor learns the same when responses exchange their rewards"


def test_roles_with_the_same_weights_have_the_same_tiny_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["models.teacher.path=recipe:sft_math#actor"]
    small, _ = make_small(load_recipe("distill_math", settings), tmp_path)
    assert small.recipe.models["teacher"].init == "actor"
    assert small.recipe.models["teacher"].scratch is None


def test_a_large_recipe_is_reduced_to_a_small_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n' * 99)
    large = load_recipe(
        "ppo_gsm8k", ["datasets.train.args.path=rows.jsonl", "ppo.minibatches=8"], ["gpu8"]
    )
    assert large.recipe.cluster.devices_per_node == 8
    small, replaced = make_small(large, tmp_path)
    recipe = small.recipe
    assert replaced == ("Qwen/Qwen2.5-0.5B-Instruct",)
    assert (recipe.cluster.devices_per_node, recipe.cluster.device, recipe.launch.type) == (
        1,
        "cpu",
        "inline",
    )
    assert recipe.models["actor"].scratch["hidden_size"] == 32
    assert recipe.models["critic"].init == "actor"
    assert (recipe.train.steps, recipe.train.prompts_per_step) == (2, 8)
    assert recipe.datasets["train"].args["max_rows"] == 16
    assert recipe.graph["actor_train"].interface.args["generation"]["max_new_tokens"] == 8
    same = {name: (call.model, call.call, call.inputs) for name, call in large.recipe.graph.items()}
    assert {
        name: (call.model, call.call, call.inputs) for name, call in recipe.graph.items()
    } == same
