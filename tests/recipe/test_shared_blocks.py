"""One block that several components are given: each takes the keys that it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcli.errors import RecipeError, UsageError
from rlcli.recipe.introspection.explanation import explain
from rlcli.recipe.introspection.json_schema import recipe_schema
from rlcli.recipe.parsing.finding import profile_names
from rlcli.recipe.resolve import load_recipe


def args_of(resolved, call):
    return resolved.recipe.graph[call].interface.args


def problems(*overrides):
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", overrides)
    return [(problem.code, problem.what) for problem in caught.value.problems]


def test_each_component_takes_only_its_own_keys_of_a_block():
    resolved = load_recipe(
        "ppo_math", ["ppo.eps_clip=0.1", "ppo.value_loss=huber", "ppo.kl_ctl=0.02"]
    )
    args = {call: args_of(resolved, call) for call in ("actor_train", "critic_train", "advantages")}
    assert args["actor_train"]["eps_clip"] == 0.1
    assert args["critic_train"] == {"value_loss": "huber"}
    assert args["advantages"]["kl_ctl"] == 0.02
    assert {"value_loss", "kl_ctl"}.isdisjoint(args["actor_train"])
    assert {"value_loss", "eps_clip"}.isdisjoint(args["advantages"])


def test_a_key_that_no_component_takes_is_one_problem():
    assert problems("ppo.kl_clt=0.1") == [("R42", "unknown key ppo.kl_clt")]


def test_a_misspelt_key_of_any_component_gets_a_suggestion():
    with pytest.raises(RecipeError, match=r"did you mean value_loss\?"):
        load_recipe("ppo_math", ["ppo.value_los=huber"])
    with pytest.raises(RecipeError, match=r"did you mean eps_clip\?"):
        load_recipe("ppo_math", ["ppo.eps_clp=0.1"])


def test_a_key_given_to_one_component_directly_must_be_its_own():
    reported = problems("graph.critic_train.interface.args.eps_clip=0.1")
    assert [message for _, message in reported] == [
        "unknown key graph.critic_train.interface.args.eps_clip"
    ]


def test_a_wrong_value_is_reported_once_per_key():
    assert [code for code, _ in problems("ppo.eps_clip=wide", "ppo.value_eps_clip=wide")] == [
        "R37",
        "R37",
    ]


def test_keys_of_an_unknown_component_are_not_reported_as_unknown():
    types = [f"graph.{call}.interface.type=ppo_acter" for call in ("actor_gen", "actor_train")]
    assert {code for code, _ in problems("ppo.eps_clip=0.1", *types)} == {"R70"}
    assert {code for code, _ in problems("ppo.eps_clp=0.1", *types)} == {"R70", "R42"}


def test_explain_names_the_calls_that_take_a_key():
    explained = explain(load_recipe("ppo_math"), "ppo.eps_clip")
    assert {use.key.split(".")[1] for use in explained.uses} == {"actor_gen", "actor_train"}
    explained = explain(load_recipe("ppo_math"), "ppo.kl_ctl")
    assert {use.key.split(".")[1] for use in explained.uses} == {"advantages"}


def test_the_schema_of_a_block_has_the_keys_of_all_its_components():
    keys = recipe_schema()["properties"]["ppo"]["properties"]
    assert {"kl_ctl", "eps_clip", "value_loss"} <= set(keys)


def test_a_block_may_become_unused_when_a_layer_replaces_its_users():
    """base/eval has a block that its evaluation is given;
    a recipe with an evaluation of its own does not care."""
    assert load_recipe("ppo_math", ["train.eval={_replace_: true}"]).recipe.train.eval.graph == {}
    reported = problems("train.eval={_replace_: true}", "evaluation.generation.greedy=false")
    assert [code for code, _ in reported] == ["R42"]


@pytest.mark.parametrize(("argument", "value"), [("gae_lambda", "0.5"), ("kl_ctl", "0.5")])
def test_an_argument_of_the_advantages_is_refused_for_the_critic_alone(argument: str, value: str):
    """Actor and critic cannot learn from different rewards."""
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", [f"graph.critic_train.interface.args.{argument}={value}"])
    (problem,) = caught.value.problems
    assert problem.what == f"unknown key graph.critic_train.interface.args.{argument}"
    assert problem.hint == f"did you mean ppo.{argument}?"
    load_recipe("ppo_math", [f"ppo.{argument}={value}"])


def test_actor_and_critic_may_have_different_numbers_of_epochs():
    overrides = [
        f"graph.{call}.interface.args.ppo_epochs=3" for call in ("critic_inf", "critic_train")
    ]
    load_recipe("ppo_math", overrides)


def test_the_hint_for_generation_size_names_both_numbers():
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", ["ppo.generation_size=8"])
    (problem,) = caught.value.problems
    assert problem.hint == (
        "set generation.responses_per_prompt to the number sampled, train_on_best to the number "
        "kept"
    )


def test_a_block_that_shares_the_interface_of_another_is_one_problem(tmp_path: Path):
    """Of calls that share an interface, one whose arguments are in doubt is not compared with the
    others."""
    text = profile_names()["async_grpo"].read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(text.replace("grpo", "mine"))
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", ["models.actor.rollout={}"], [str(tmp_path / "mine.yaml")])
    assert [problem.what for problem in caught.value.problems] == [
        "unknown key mine.use_decoupled_loss"
    ]


def test_calls_that_share_an_interface_are_compared_with_its_defaults():
    inference = (
        "{model: actor, call: inference, interface: ppo_actor, output_key_remap: "
        "{packed_logprobs: other}}"
    )
    with pytest.raises(
        RecipeError, match="loss_aggregation is 'sequence' in one and 'token' in the other"
    ):
        load_recipe("grpo_math", [f"graph.again={inference}"])


def test_another_component_of_a_call_takes_its_arguments_from_the_same_block():
    overrides = [
        "graph.advantages.interface.type=gae",
        "grpo.kl_ctl=0.02",
        "grpo.disable_value=true",
    ]
    args = args_of(load_recipe("grpo_math", overrides), "advantages")
    assert (args["kl_ctl"], args["disable_value"]) == (0.02, True)
    assert "loss_aggregation" not in args


def test_one_call_may_set_an_argument_of_its_own_on_top_of_the_block():
    override = "graph.advantages.interface.args.kl_ctl=0.05"
    assert args_of(load_recipe("ppo_math", [override]), "advantages")["kl_ctl"] == 0.05
    both = load_recipe("ppo_math", [override, "ppo.kl_ctl=0.2"])
    assert args_of(both, "advantages")["kl_ctl"] == 0.05


def test_a_key_of_a_block_that_a_layer_below_makes_ineffective_is_refused(tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: ppo_math\ngraph: {advantages: {interface: {args: {kl_ctl: 0.05}}}}\n")
    load_recipe(mine)
    with pytest.raises(RecipeError) as caught:
        load_recipe(mine, ["ppo.kl_ctl=0.2"])
    (problem,) = caught.value.problems
    assert problem.what.startswith(
        "ppo.kl_ctl has no effect: graph.advantages.interface.args.kl_ctl is set at "
    )
    assert problem.hint == "set that instead: graph.advantages.interface.args.kl_ctl=…"
    load_recipe(mine, ["graph.advantages.interface.args.kl_ctl=0.2"])


@pytest.mark.parametrize(
    ("override", "layer"),
    [
        (  # merged with the block's
            "evaluation.generation.greedy=false",
            "train: {eval: {graph: {eval_gen: {interface: {args: {generation: {top_p: 0.9}}}}}}}",
        ),
        (  # another key takes the value, too
            "ppo.kl_ctl=0.2",
            "graph: {advantages: {interface: {args: {kl_ctl: 0.05}}}}\n"
            "models: {actor: {backend: {args: {lr: '${ppo.kl_ctl}'}}}}",
        ),
    ],
)
def test_a_key_of_a_block_that_has_some_effect_is_accepted(
    tmp_path: Path, override: str, layer: str
):
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: ppo_math\n{layer}\n")
    load_recipe(mine, [override])


def test_explain_lists_no_key_of_a_block_that_its_only_call_sets_on_its_own():
    resolved = load_recipe("grpo_calculator")
    assert "grpo.max_turns" not in {leaf.key for leaf in explain(resolved, "grpo")}
    with pytest.raises(UsageError, match=r"no key grpo\.max_turns") as caught:
        explain(resolved, "grpo.max_turns")
    assert "did you mean graph.actor_gen.interface.args.max_turns?" in str(caught.value.hint)


def test_explain_names_the_calls_in_which_a_key_that_no_layer_sets_has_another_default():
    def others(*overrides: str) -> dict[str, str]:
        explained = explain(load_recipe("ppo_math", overrides), "ppo.kl_estimator")
        return {use.key: use.value_there for use in explained.uses if use.value_there is not None}

    assert others() == {"graph.advantages.interface.args.kl_estimator": "k1"}
    assert others("ppo.kl_estimator=k2") == {}


def test_a_key_of_a_block_that_only_the_command_line_has_must_be_read(tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: ppo_math\nmy: {lr: 1e-5, for_others: 3}\n"
        "models: {actor: {backend: {args: {lr: '${my.lr}'}}}}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(mine, ["my.rl=1e-4"])
    (problem,) = caught.value.problems
    assert (problem.what, problem.hint) == ("unknown key my.rl", "did you mean lr?")
    load_recipe(mine, ["my.for_others=4", "my.lr=1e-4"])
    changed = load_recipe(mine, ["my.rl=0.5", "models.actor.backend.args.lr=${my.rl}"])
    assert changed.recipe.models["actor"].backend.args["lr"] == 0.5
