"""Recipes that are valid but probably a mistake."""

from rlcli.inspect.doubtful import recipe_warnings
from rlcli.recipe.resolve import load_recipe

BEHIND = (
    "models.sampler={init: actor, backend: inference}",
    "graph.actor_gen.model=sampler",
    "cluster.device=cuda",
)


def test_a_sampler_that_never_follows_the_trained_role_causes_a_warning():
    (warning,) = recipe_warnings(load_recipe("ppo_math", BEHIND))
    assert warning == (
        "command line: each step actor_gen samples with the weights that sampler began with, while "
        "actor is trained; graph.actor_train.hooks.copy_to=sampler makes it follow"
    )


def test_a_sampler_that_follows_the_trained_role_causes_no_warning():
    assert not list(
        recipe_warnings(
            load_recipe("ppo_math", [*BEHIND, "graph.actor_train.hooks.copy_to=sampler"])
        )
    )
    assert not list(recipe_warnings(load_recipe("ppo_math", ["cluster.device=cuda"])))
