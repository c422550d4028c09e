"""One block that several components share: each takes the keys that it has."""

from __future__ import annotations

import pytest

from rlcli.errors import RecipeError
from rlcli.recipe.introspection.explanation import explain
from rlcli.recipe.introspection.json_schema import recipe_schema
from rlcli.recipe.resolve import load_recipe

TRAINS = ("actor_train", "critic_train")


def args_of(resolved, call):
    return resolved.recipe.graph[call].interface.args


def problems(*overrides):
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", overrides)
    return [(problem.code, problem.what) for problem in caught.value.problems]


def test_each_component_takes_only_its_own_keys_of_a_block():
    resolved = load_recipe("ppo_math", ["ppo.eps_clip=0.1", "ppo.value_loss=huber", "ppo.kl_ctl=0.02"])
    actor, critic = (args_of(resolved, call) for call in TRAINS)
    assert (actor["eps_clip"], actor["kl_ctl"]) == (0.1, 0.02)
    assert (critic["value_loss"], critic["kl_ctl"]) == ("huber", 0.02)
    assert "value_loss" not in actor
    assert "eps_clip" not in critic


def test_a_key_that_no_component_takes_is_one_problem():
    assert problems("ppo.kl_clt=0.1") == [("R42", "unknown key ppo.kl_clt")]


def test_a_misspelt_key_of_any_component_gets_a_suggestion():
    with pytest.raises(RecipeError, match=r"did you mean value_loss\?"):
        load_recipe("ppo_math", ["ppo.value_los=huber"])
    with pytest.raises(RecipeError, match=r"did you mean eps_clip\?"):
        load_recipe("ppo_math", ["ppo.eps_clp=0.1"])


def test_a_key_given_to_one_component_directly_must_be_its_own():
    reported = problems("graph.critic_train.interface.args.eps_clip=0.1")
    assert [message for _, message in reported] == ["unknown key graph.critic_train.interface.args.eps_clip"]


def test_a_wrong_value_is_reported_once_per_key():
    assert [code for code, _ in problems("ppo.eps_clip=wide", "ppo.value_eps_clip=wide")] == ["R37", "R37"]


def test_keys_of_an_unknown_component_are_not_reported_as_unknown():
    types = [f"graph.{call}.interface.type=ppo_acter" for call in ("actor_gen", "actor_train")]
    assert {code for code, _ in problems("ppo.eps_clip=0.1", *types)} == {"R70"}
    assert {code for code, _ in problems("ppo.eps_clp=0.1", *types)} == {"R70", "R42"}


def test_explain_names_the_calls_that_take_a_key():
    explained = explain(load_recipe("ppo_math"), "ppo.eps_clip")
    assert {use.key.split(".")[1] for use in explained.uses} == {"actor_gen", "actor_train"}
    explained = explain(load_recipe("ppo_math"), "ppo.kl_ctl")
    assert {use.key.split(".")[1] for use in explained.uses} == {"actor_gen", "critic_inf", *TRAINS}


def test_the_schema_of_a_block_has_the_keys_of_all_its_components():
    keys = recipe_schema()["properties"]["ppo"]["properties"]
    assert {"kl_ctl", "eps_clip", "value_loss"} <= set(keys)


def test_a_block_may_become_unused_when_a_layer_replaces_its_users():
    """base/eval has a block that its evaluation is given; a recipe with its own evaluation does not use it."""
    assert load_recipe("ppo_math", ["train.eval={_replace_: true}"]).recipe.train.eval.graph == {}
    reported = problems("train.eval={_replace_: true}", "evaluation.generation.greedy=false")
    assert [code for code, _ in reported] == ["R42"]


@pytest.mark.parametrize(
    ("argument", "value", "of_actor"),
    [("gae_lambda", "0.5", "1.0 in actor_train (the default)"), ("kl_ctl", "0.5", "0.01 in actor_train (")],
)
def test_different_reward_settings_of_actor_and_critic_are_refused(argument, value, of_actor):
    overrides = [f"graph.{call}.interface.args.{argument}={value}" for call in ("critic_inf", "critic_train")]
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", overrides)
    (problem,) = caught.value.problems
    assert f"{argument} is {of_actor}" in problem.what
    assert f"and {value} in critic_train (command line)" in problem.what
    load_recipe("ppo_math", [f"ppo.{argument}={value}"])


def test_actor_and_critic_may_have_different_numbers_of_epochs():
    overrides = [f"graph.{call}.interface.args.ppo_epochs=3" for call in ("critic_inf", "critic_train")]
    load_recipe("ppo_math", overrides)


@pytest.mark.parametrize(("best_of", "is_refused"), [((), False), (("ppo.generation_size=8",), True)])
def test_different_response_counts_are_refused_only_with_best_of_n(best_of, is_refused):
    overrides = [
        f"graph.{call}.interface.args.generation.responses_per_prompt=2" for call in ("critic_inf", "critic_train")
    ]
    if not is_refused:
        load_recipe("ppo_math", [*overrides, *best_of])
        return
    with pytest.raises(RecipeError, match=r"generation is .* in critic_train .*, but both learn from what it decides"):
        load_recipe("ppo_math", [*overrides, *best_of])
