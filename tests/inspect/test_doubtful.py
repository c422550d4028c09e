"""Recipes that are valid, and hardly meant so."""

from rlcli.inspect.doubtful import recipe_warnings
from rlcli.recipe.resolve import load_recipe

BEHIND = ("models.sampler={init: actor, backend: inference}", "graph.actor_gen.model=sampler", "cluster.device=cuda")


def test_a_sampler_that_stays_behind_is_warned_of():
    (warning,) = recipe_warnings(load_recipe("ppo_math", BEHIND))
    assert warning == (
        "command line: each step actor_gen samples with the weights that sampler began with, while actor is trained; "
        "graph.actor_train.hooks.copy_to=sampler has it follow"
    )


def test_one_that_follows_is_not():
    assert not list(recipe_warnings(load_recipe("ppo_math", [*BEHIND, "graph.actor_train.hooks.copy_to=sampler"])))
    assert not list(recipe_warnings(load_recipe("ppo_math", ["cluster.device=cuda"])))
