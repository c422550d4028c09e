"""`models.<role>.rollout`: a few keys that make a follower,
move the generating calls to it and copy weights."""

from __future__ import annotations

import pytest

from rlcli.errors import RecipeError
from rlcli.recipe.graph import train_graph
from rlcli.recipe.introspection.completions import override_candidates, sketch
from rlcli.recipe.introspection.explanation import explain
from rlcli.recipe.introspection.json_schema import schema_of
from rlcli.recipe.introspection.minimal import superfluous
from rlcli.recipe.resolve import load_recipe
from rlcli.topology import plan_topology

TWO_DEVICES = ("cluster.devices_per_node=2", "launch=local")
FOUR_DEVICES = ("cluster.devices_per_node=4", "launch=local")
ROLLOUT = "models.actor.rollout"
APART = f"{ROLLOUT}.devices=1"


def roles(*overrides, profiles=()):
    recipe = load_recipe("ppo_math", overrides, profiles).recipe
    return {placement.role: placement.ranks for placement in plan_topology(recipe).placements}


def test_a_rollout_becomes_a_following_role_that_generates():
    recipe = load_recipe("ppo_math", [*TWO_DEVICES, APART]).recipe
    follower = recipe.models["actor_rollout"]
    assert (follower.init, follower.backend.type, follower.devices) == ("actor", "inference", "1")
    assert recipe.models["actor"].rollout is None
    assert recipe.graph["actor_gen"].model == "actor_rollout"
    assert recipe.train.eval.graph["eval_gen"].model == "actor_rollout"
    assert recipe.graph["actor_train"].hooks.copy_to == "actor_rollout"
    (trained,) = [mfc for mfc in train_graph(recipe) if mfc.name == "actor_train"]
    assert trained.written_roles == ("actor", "actor_rollout")


def test_the_transfer_of_a_rollout_is_that_of_its_copies():
    recipe = load_recipe("ppo_math", [*TWO_DEVICES, APART, f"{ROLLOUT}.transfer=delta"]).recipe
    assert recipe.graph["actor_train"].hooks.transfer == "delta"


@pytest.mark.parametrize("setting", ["eta=0.5", "transfer=delta"])
def test_how_weights_are_copied_is_refused_where_none_are(setting):
    hook = f"graph.actor_train.hooks.{setting}"
    with pytest.raises(RecipeError, match=r"R49.*has no effect without copy_to"):
        load_recipe("ppo_math", [hook])
    load_recipe("ppo_math", [hook, "graph.actor_train.hooks.copy_to=ref"])


def test_a_delta_for_a_moving_average_is_refused():
    overrides = [
        "graph.actor_train.hooks.copy_to=ref",
        "graph.actor_train.hooks.eta=0.5",
        "graph.actor_train.hooks.transfer=delta",
    ]
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", overrides)
    assert "ref mixes weights with eta 0.5, so a delta would not fit" in str(caught.value)
    assert "graph.actor_train.hooks.transfer=full" in str(caught.value)


def test_other_roles_get_the_devices_that_rollouts_leave():
    on_device_0 = dict.fromkeys(["actor", "critic", "ref", "reward"], (0,))
    assert roles(*TWO_DEVICES, APART) == on_device_0 | {"actor_rollout": (1,)}
    split = roles(*FOUR_DEVICES, "models.actor.rollout.devices=2-3", "models.ref.devices=3")
    assert (split["actor"], split["ref"], split["actor_rollout"]) == ((0, 1), (3,), (2, 3))


def test_a_rollout_without_devices_shares_those_of_its_role():
    assert roles(*FOUR_DEVICES, "models.actor.rollout={}", "models.actor.devices=0-1")[
        "actor_rollout"
    ] == (0, 1)
    assert roles("models.actor.rollout.devices=0") == dict.fromkeys(
        ["actor", "critic", "ref", "reward", "actor_rollout"], (0,)
    )


def test_the_async_profile_sets_a_rollout_and_staleness():
    resolved = load_recipe("ppo_math", [*TWO_DEVICES, APART], ["async"])
    assert resolved.recipe.graph["actor_gen"].model == "actor_rollout"
    assert resolved.recipe.train.max_staleness == 1
    assert superfluous(resolved, resolved.layers[-1]) == []
    inside = load_recipe("ppo_math", ["models.actor.rollout=null"], ["async"]).recipe
    assert inside.graph["actor_gen"].model == "actor"


def test_a_resolved_recipe_loads_to_the_same(tmp_path):
    recipe = load_recipe("ppo_math", [*TWO_DEVICES, APART], ["async"])
    (tmp_path / "resolved.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "resolved.yaml").recipe == recipe.recipe


def test_a_rollout_has_the_tokenizer_of_its_role():
    recipe = load_recipe(
        "ppo_math", ["models.actor.tokenizer=builtin:arithmetic", "models.actor.rollout={}"]
    ).recipe
    assert recipe.models["actor_rollout"].tokenizer == "builtin:arithmetic"


@pytest.mark.parametrize(
    ("overrides", "code", "words", "hint"),
    [
        (
            ["models.actor.rollout.devces=1"],
            "R42",
            "unknown key models.actor.rollout.devces",
            "devices",
        ),
        (["models.actor.rollot={}"], "R42", "unknown key models.actor.rollot", "rollout"),
        (["models.actor.rollout.path=x"], "R43", "unknown key models.actor.rollout.path", None),
        (["models.actor.rollout=3"], "R37", "must be a mapping", None),
        (
            ["models.actor.rollout.backend=inferense"],
            "R70",
            "no backend is named 'inferense'",
            "inference",
        ),
        (["models.actor.rollout.backend.args.dtyp=x"], "R42", "dtyp", "dtype"),
        (["models.actor.rollout.devices=7"], "R50", "actor_rollout uses rank 7", None),
        (["models.actor.rollout.mesh.tp=2"], "R49", "does not fit its 1 device", None),
        (
            ["models.critic.rollout={}"],
            "R71",
            "no call generates with critic",
            "models.critic.rollout=null",
        ),
        (
            ["models.actor.rollout={}", "models.actor.head=value"],
            "R71",
            "needs the head lm",
            "models.actor.head=lm",
        ),
        (
            ["models.actor.rollout={}", "models.actor_rollout={init: actor}"],
            "R71",
            "has already",
            "rename",
        ),
        (
            ["models.actor.rollout={}", "graph.actor_train.hooks.copy_to=ref"],
            "R71",
            "to ref (copy_to)",
            "null",
        ),
    ],
)
def test_an_invalid_rollout_is_one_problem_with_its_location(overrides, code, words, hint):
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", overrides)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert words in f"{problem.what} {problem.hint}"
    assert problem.where == "command line"
    assert hint is None or hint in f"{problem.what} {problem.hint}"


def test_a_rollout_of_an_untrained_role_is_refused():
    overrides = [
        "models.actor.rollout={}",
        "models.actor.tokenizer=builtin:arithmetic",
        "models.actor.path=x",
        "datasets.train=arithmetic",
    ]
    with pytest.raises(RecipeError, match="no call trains actor"):
        load_recipe("base/generation", overrides)


def test_explain_finds_keys_of_a_rollout_under_both_names():
    resolved = load_recipe("ppo_math", [*TWO_DEVICES, APART])
    for key in ("models.actor.rollout.devices", "models.actor_rollout.devices"):
        explanation = explain(resolved, key)
        assert (explanation.key, explanation.value, explanation.steps[-1].where) == (
            "models.actor_rollout.devices",
            "1",
            "command line",
        )
    of_others = explain(resolved, "models.critic.devices")
    assert (of_others.value, of_others.steps[0].note) == ("0", "models.actor.rollout.devices")


def test_completion_and_schema_include_the_keys_of_rollouts():
    tree = sketch("ppo_math", profiles=["async"])
    words = [candidate.text for candidate in override_candidates(tree, "models.actor.rollout.")]
    assert "models.actor.rollout.devices=" in words
    assert "models.actor.rollout.mesh." in words
    offered = [
        candidate.text for candidate in override_candidates(tree, "models.actor.rollout.backend=")
    ]
    assert "models.actor.rollout.backend=inference" in offered
    rollout = schema_of("models")["$defs"]["Rollout"]["properties"]
    assert set(rollout) >= {"backend", "mesh", "devices"}
    assert {"$ref": "#/$defs/backends"} in rollout["backend"]["anyOf"]
