"""Recipes of format 1, in which calls that train have the arguments of the call that computes
advantages now."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcli.errors import RecipeError
from rlcli.recipe.introspection.explanation import explain
from rlcli.recipe.parsing.problems import Problem
from rlcli.recipe.parsing.write import to_yaml
from rlcli.recipe.resolve import Resolved, load_recipe
from rlcli.recipe.schema import Recipe

TODAY = """\
models:
  actor: {scratch: {model_type: llama}, tokenizer: builtin:arithmetic}
  critic: {init: actor, head: value}
  ref: {init: actor}
  reward: {backend: null}
datasets: {train: arithmetic}
train: {steps: 3, prompts_per_step: 4}
graph:
  actor_gen: {model: actor, call: generate, interface: {type: ppo_actor, args: {ACTOR}}}
  reward_inf: {model: reward, call: inference, interface: math_reward}
  ref_inf: {model: ref, call: inference, interface: reference}
  critic_inf: {model: critic, call: inference, interface: {type: ppo_critic, args: {CRITIC}}}
  gae: {model: actor, call: inference, interface: {type: gae, args: {GAE}}}
  actor_train: {model: actor, call: train_step, interface: {type: ppo_actor, args: {ACTOR}}}
  critic_train: {model: critic, call: train_step, interface: {type: ppo_critic, args: {CRITIC}}}
"""

WITHOUT_ADVANTAGES = "".join(line for line in TODAY.splitlines(keepends=True) if "gae:" not in line)


def written(text: str, **arguments: str) -> str:
    for name in ("ACTOR", "CRITIC", "GAE"):
        text = text.replace(name, arguments.get(name, ""))
    return text


def loaded(folder: Path, text: str, *overrides: str) -> Resolved:
    (folder / "mine.yaml").write_text(text)
    return load_recipe("mine.yaml", overrides)


def refused(folder: Path, text: str, *overrides: str) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        loaded(folder, text, *overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("actor", "critic", "gae"),
    [
        ("", "", ""),
        ("kl_ctl: 0.3, eps_clip: 0.1", "kl_ctl: 0.3, value_eps_clip: 0.4", "kl_ctl: 0.3"),
        (
            "gae_lambda: 0.95, discount: 0.9",
            "gae_lambda: 0.95, discount: 0.9",
            "gae_lambda: 0.95, discount: 0.9",
        ),
        ("kl_ctl: 0.1", "", "kl_ctl: 0.1"),  # the default of the other
        # also an argument of the loss
        ("kl_estimator: k2", "kl_estimator: k2", "kl_estimator: k2"),
        ("generation: {top_p: 0.9}", "generation: {top_p: 0.9}", ""),
    ],
)
def test_a_recipe_without_the_call_means_the_one_with_it(
    folder: Path, actor: str, critic: str, gae: str
):
    older = loaded(folder, written(WITHOUT_ADVANTAGES, ACTOR=actor, CRITIC=critic))
    own_of_actor = ", ".join(
        a for a in actor.split(", ") if a.startswith(("eps_clip", "kl_estimator", "generation"))
    )
    own_of_critic = ", ".join(a for a in critic.split(", ") if a.startswith("value_eps_clip"))
    today = loaded(folder, written(TODAY, ACTOR=own_of_actor, CRITIC=own_of_critic, GAE=gae))
    assert older.recipe == today.recipe
    assert list(older.recipe.graph) == list(today.recipe.graph)


def test_a_block_of_all_calls_feeds_the_inserted_call(folder: Path):
    blocks = written(WITHOUT_ADVANTAGES).replace("args: {}", 'args: "${ppo}"')
    resolved = loaded(folder, f"{blocks}ppo: {{kl_ctl: 0.3, eps_clip: 0.1, value_loss: huber}}\n")
    args = {name: call.interface.args for name, call in resolved.recipe.graph.items()}
    assert args["gae"] == {"kl_ctl": 0.3}
    assert args["actor_train"] == args["actor_gen"] == {"eps_clip": 0.1}
    assert args["critic_train"] == args["critic_inf"] == {"value_loss": "huber"}
    explanation = explain(resolved, "graph.gae.interface.args.kl_ctl")
    assert not isinstance(explanation, list)
    assert [step.where for step in explanation.steps if step.wins] == ["mine.yaml:15:15"]


@pytest.mark.parametrize(
    ("actor", "critic", "where", "values"),
    [
        (
            "",
            "gae_lambda: 0.5",
            "mine.yaml:14:100",
            ["1.0 in actor_train (the default)", "0.5 in critic_train"],
        ),
        (
            "kl_ctl: 0.2",
            "kl_ctl: 0.5",
            "mine.yaml:14:96",
            ["0.2 in actor_train (mine.yaml:13:93)", "0.5 in critic_tr"],
        ),
        (
            "kl_estimator: k3",
            "",
            "mine.yaml:13:99",
            ["'k3' in actor_train", "'k1' in critic_train (the default)"],
        ),
    ],
)
def test_rewards_that_would_differ_are_refused_with_both_places(
    folder: Path, actor: str, critic: str, where: str, values: list[str]
):
    """As `gae_lambda` for the critic alone did, when actor and critic each computed advantages."""
    text = written(WITHOUT_ADVANTAGES, ACTOR=actor, CRITIC=critic)
    (problem,) = refused(folder, text)
    argument = (actor or critic).partition(":")[0]
    assert (problem.code, problem.where) == ("R71", where)
    assert all(value in problem.what for value in values)
    assert problem.hint == f"set {argument} to the same value for all"


@pytest.mark.parametrize("argument", ["gae_lambda", "kl_ctl"])
def test_with_the_call_the_critic_cannot_have_arguments_of_its_own_for_it(
    folder: Path, argument: str
):
    (problem,) = refused(
        folder, written(TODAY), f"graph.critic_train.interface.args.{argument}=0.5"
    )
    assert (problem.code, problem.where) == ("R43", "command line")
    assert problem.hint == f"did you mean graph.gae.interface.args.{argument}?"


def test_listed_inputs_and_renames_of_format_1_are_those_of_the_inserted_call(folder: Path):
    inputs = (
        "packed_input_ids, prompt_mask, packed_logprobs, seq_no_eos_mask, "
        "packed_ref_logprobs, rewards, estimates"
    )
    keys = f"inputs: [{inputs}], input_key_remap: {{estimates: values}}, "
    text = written(WITHOUT_ADVANTAGES).replace("call: train_step, ", f"call: train_step, {keys}")
    text = text.replace(
        "{type: ppo_critic, args: {}}}", "ppo_critic, output_key_remap: {values: estimates}}", 1
    )
    graph = loaded(folder, text).recipe.graph
    assert (
        graph["gae"].input_key_remap
        == graph["critic_train"].input_key_remap
        == {"estimates": "values"}
    )
    assert graph["actor_train"].input_key_remap == {}
    assert set(graph["critic_train"].inputs) == {
        "packed_input_ids",
        "estimates",
        "returns",
        "loss_mask",
    }


def test_an_estimator_of_ones_own_needs_no_other_call(folder: Path):
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    (folder / "interfaces").mkdir()
    (folder / "interfaces" / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom rlcli.interfaces._advantages import "
        "AdvantageInterface\n"
        "from rlcli.api.model import register_interface\n\n"
        "@dataclass(kw_only=True)\nclass Mine(AdvantageInterface):\n    pass\n\n"
        'register_interface("mine", Mine)\n'
    )
    graph = loaded(folder, written(TODAY).replace("type: gae", "type: mine")).recipe.graph
    assert [call.interface.type for call in graph.values()].count("gae") == 0
    assert len(graph) == 7


def test_a_resolved_recipe_of_format_1_is_read(folder: Path):
    """It lists the inputs of its calls."""
    today = load_recipe("ppo_math")
    record = today.to_json()
    del record["format"], record["graph"]["advantages"]
    for call in ("actor_train", "critic_train"):
        record["graph"][call]["inputs"] = [
            *record["graph"]["actor_gen"]["outputs"],
            "rewards",
            "values",
        ]
        record["graph"][call]["interface"]["args"] |= {"kl_ctl": 0.01, "bootstrap_no_eos": False}
    older = loaded(folder, to_yaml(record))
    args = older.recipe.graph["gae"].interface.args
    assert args == {"kl_ctl": 0.01, "bootstrap_no_eos": False}
    assert older.recipe.graph["actor_train"] == today.recipe.graph["actor_train"]
    assert older.recipe.graph["critic_train"] == today.recipe.graph["critic_train"]


def test_an_interface_that_was_replaced_is_refused_with_the_verb_that_rewrites_it(folder: Path):
    text = written(WITHOUT_ADVANTAGES).replace("ppo_actor", "grpo")
    problems = refused(folder, text)
    assert {problem.code for problem in problems} == {"R70"}
    assert (
        problems[0].what
        == "the interface grpo is now ppo_actor, with a call of group_relative before it"
    )
    assert problems[0].hint == "rlcli migrate FILE rewrites the recipe"


def test_a_newer_format_is_refused_alone(folder: Path):
    (problem,) = refused(folder, f"format: 3\nunheard_of: 1\n{written(TODAY)}")
    assert (problem.code, problem.where) == ("F85", "mine.yaml:1:9")
    assert problem.what == "the recipe has format 3; this rlcli reads up to 2"
    assert problem.hint == "use a newer rlcli"


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
def test_a_format_that_never_was_is_refused(folder: Path, number: str):
    (problem,) = refused(folder, f"format: {number}\n{written(TODAY)}")
    assert problem.where == "mine.yaml:1:9"
    assert problem.what.startswith("format")


def test_a_resolved_recipe_has_a_format(folder: Path):
    record = load_recipe("ppo_math").to_json()
    assert record["format"] == 2
    assert Recipe.model_validate(record).format == 2
