"""Calls that list no keys have those that their interfaces declare, and their graph is the one
written out by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.dataflow import CallGraph, MFCDef
from rlcli.errors import RecipeError
from rlcli.recipe import components
from rlcli.recipe.expansion import call_keys
from rlcli.recipe.graph import eval_graph, stages, train_graph, waits_for
from rlcli.recipe.introspection.explanation import explain
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import Call, Recipe

EXPLICIT = json.loads(Path(__file__).with_name("explicit_graphs.json").read_text(encoding="utf-8"))
"""Graphs whose calls listed all their keys by hand, before they had any by default. For each
combination of arguments the training calls listed what the checks of that time demanded, and
nothing else. Edge → the keys that flow there."""

WHERE_GIVEN = {
    "actor_gen → ref_inf": {"prompt_mask"},
    "actor_gen → proximal_inf": {"prompt_mask"},
}
"""What interfaces read `if given`, and nobody had listed."""

PROXIMAL = """\
graph:
  proximal_inf:
    model: actor
    call: inference
    interface: {type: ppo_actor, args: "${ppo}"}
    output_key_remap: {packed_logprobs: proximal_logprobs}
"""


def edges(graph: list[MFCDef]) -> dict[str, set[str]]:
    """Who gives which keys to whom; what nobody reads flows nowhere."""
    produced = {key for mfc in graph for key in mfc.produced_keys}
    read = CallGraph(graph).reads
    flows = {
        f"{giver} → {reader}": set(keys)
        for reader, from_calls in read.items()
        for giver, keys in from_calls.items()
    }
    brought = {f"dataset → {mfc.name}": set(mfc.input_keys) - produced for mfc in graph}
    return flows | {edge: keys for edge, keys in brought.items() if keys}


def without(flows: dict[str, set[str]], left_out: dict[str, set[str]]) -> dict[str, list[str]]:
    """The edges without some keys, all of which they have."""
    assert all(left_out[edge] <= keys for edge, keys in flows.items() if edge in left_out)
    return {
        edge: sorted(keys - left_out.get(edge, set()))
        for edge, keys in flows.items()
        if keys - left_out.get(edge, set())
    }


ARGUMENTS = list(itertools.product(("0.0", "0.01"), ("false", "true"), ("false", "true")))


@pytest.mark.parametrize(("kl_ctl", "disable_value", "use_decoupled_loss"), ARGUMENTS)
def test_the_derived_graph_of_ppo_equals_the_handwritten_one(
    folder: Path, kl_ctl, disable_value, use_decoupled_loss
):
    arguments = (
        f"kl_ctl={kl_ctl} disable_value={disable_value} use_decoupled_loss={use_decoupled_loss}"
    )
    needs_it = use_decoupled_loss == "true"
    (folder / "mine.yaml").write_text("extends: ppo_math\n" + (PROXIMAL if needs_it else ""))
    recipe = load_recipe("mine.yaml", [f"ppo.{argument}" for argument in arguments.split()]).recipe
    expected = EXPLICIT[arguments]
    assert stages(recipe.graph) == expected["stages"]
    assert without(edges(train_graph(recipe)), WHERE_GIVEN) == expected["graph"]
    assert without(edges(eval_graph(recipe)), {}) == expected["evaluation"]


@pytest.mark.parametrize(
    ("name", "explicit"), [("ppo_math", "as shipped"), ("sft_math", "sft_math")]
)
def test_the_derived_graph_of_a_shipped_recipe_equals_the_handwritten_one(name: str, explicit: str):
    recipe = load_recipe(name).recipe
    expected = EXPLICIT[explicit]
    assert stages(recipe.graph) == expected["stages"]
    assert without(edges(train_graph(recipe)), WHERE_GIVEN) == expected["graph"]
    assert without(edges(eval_graph(recipe)), {}) == expected["evaluation"]


def test_a_key_that_no_call_produces_is_one_problem_for_all_readers(folder: Path):
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", ["ppo.use_decoupled_loss=true"])
    (problem,) = caught.value.problems
    assert problem.code == "R71"
    assert problem.what == (
        "advantages reads proximal_logprobs, which neither a call nor the dataset provides"
    )
    setting = "ppo.use_decoupled_loss=false"
    assert problem.hint == f"add a call that makes proximal_logprobs, or set {setting}"
    assert "type: gae" in (problem.excerpt or "")


def test_null_restores_the_default_inputs_that_a_list_replaced(folder: Path):
    by_hand = (
        "[packed_input_ids, prompt_mask, packed_logprobs, advantages, loss_mask, old_logprobs]"
    )
    listed = load_recipe("ppo_math", [f"graph.actor_train.inputs={by_hand}"])
    assert "packed_ref_logprobs" not in listed.recipe.graph["actor_train"].inputs
    assert listed.origin("graph.actor_train.inputs").file == "command line"
    (folder / "mine.yaml").write_text(
        f"extends: ppo_math\ngraph: {{actor_train: {{inputs: {by_hand}}}}}\n"
    )
    again = load_recipe("mine.yaml", ["graph.actor_train.inputs=null"])
    assert again.recipe.graph == load_recipe("ppo_math").recipe.graph
    assert str(again.origin("graph.actor_train.inputs")) == "default, READS of ppo_actor"
    assert str(again.origin("graph.critic_inf.outputs")) == "default, WRITES of ppo_critic"
    explanation = explain(again, "graph.actor_train.inputs")
    assert not isinstance(explanation, list)
    assert [(step.where, step.note, step.wins) for step in explanation.steps] == [
        ("default", "READS of ppo_actor", True),
        ("mine.yaml:2:31", None, False),
        ("command line", None, False),
    ]


def test_default_keys_follow_renames(folder: Path):
    text = """\
graph:
  critic_inf: {output_key_remap: {values: old_values}}
  advantages: {input_key_remap: &new {old_values: values}}
  critic_train: {input_key_remap: *new}
"""
    (folder / "good.yaml").write_text(f"extends: ppo_math\n{text}")
    graph = load_recipe("good.yaml").recipe.graph
    assert graph["critic_inf"].outputs == ["values"]
    for call in ("advantages", "critic_train"):
        assert "old_values" in graph[call].inputs
        assert "values" not in graph[call].inputs


@pytest.mark.parametrize(
    ("rename", "message", "hint"),
    [
        (
            "critic_inf: {output_key_remap: {value: v}}",
            (
                "graph.critic_inf.output_key_remap renames value, and inference of "
                "ppo_critic does not write value"
            ),
            "did you mean values?",
        ),
        (
            "ref_inf: {input_key_remap: {mask: prompt_msk}}",
            (
                "graph.ref_inf.input_key_remap renames mask, and inference of reference "
                "does not read prompt_msk"
            ),
            "did you mean prompt_mask?",
        ),
        (
            "ref_inf: {input_key_remap: {mask: prompt_mask}}",
            "ref_inf reads mask, which neither a call nor the dataset provides",
            "add a call that makes mask",
        ),
        (
            "critic_inf: {output_key_remap: {values: old}}",
            (
                "advantages and critic_train read values, which neither a call nor the "
                "dataset provides"
            ),
            "critic_inf makes it as old: rename it in input_key_remap too",
        ),
        (
            "reward_inf: {input_key_remap: {prompt_mask: mask}}",
            "graph.reward_inf lacks the input prompt_mask, which inference of math_reward reads",
            "its input_key_remap renames prompt_mask to mask",
        ),
    ],
)
def test_a_wrong_rename_is_one_problem(folder: Path, rename: str, message: str, hint: str):
    (folder / "bad.yaml").write_text(
        f"extends: ppo_math\ntrain: {{eval: {{dataset: null}}}}\ngraph: {{{rename}}}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe("bad.yaml")
    assert [(problem.what, problem.hint) for problem in caught.value.problems] == [(message, hint)]


def test_a_resolved_recipe_lists_all_keys(folder: Path):
    resolved = load_recipe("ppo_math")
    again = Recipe.model_validate(resolved.to_json())
    assert again.graph == resolved.recipe.graph
    (folder / "flat.yaml").write_text(resolved.to_yaml())
    assert load_recipe("flat.yaml").recipe == resolved.recipe


# -- what is read where it is given, whatever interfaces declare -----------------------------------

NAMES = "abcde"
KEYS = [f"k{number}" for number in range(6)]


@st.composite
def declared_graphs(draw: st.DrawFn) -> dict[str, tuple[list[str], list[str]]]:
    """Call → what it writes, and what it reads: always (only keys of earlier calls: no cycle),
    or if given."""
    owners = draw(st.lists(st.sampled_from([*NAMES, ""]), min_size=len(KEYS), max_size=len(KEYS)))
    graph = {}
    for position, name in enumerate(NAMES):
        earlier = [
            key
            for key, owner in zip(KEYS, owners, strict=True)
            if owner and owner in NAMES[:position]
        ]
        needed = draw(st.lists(st.sampled_from(earlier), unique=True)) if earlier else []
        optional = draw(st.lists(st.sampled_from(KEYS), unique=True))
        written = [key for key, owner in zip(KEYS, owners, strict=True) if owner == name]
        graph[name] = (written, [*needed, *(f"{key} if given" for key in optional)])
    return graph


@given(
    declared=declared_graphs(), order=st.permutations(NAMES), brought=st.sets(st.sampled_from(KEYS))
)
def test_optional_reads_never_create_a_cycle(declared: Any, order: list[str], brought: set[str]):
    def constants(_: str, name: str, constant: str) -> Any:
        return {"inference": tuple(declared[name][constant == "READS"])}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(components, "declared", constants)
        written = {
            name: Call.model_validate(
                {"model": "m", "call": "inference", "interface": {"type": name}}
            )
            for name in order
        }
        calls = call_keys.with_declared_keys(written, brought)
    stages(calls)  # raises for a cycle
    owners = {key: name for name, (keys, _) in declared.items() for key in keys}
    waits = waits_for(calls)
    for name, (keys, entries) in declared.items():
        assert calls[name].outputs == keys
        for entry in entries:
            key, *condition = entry.split(" ")
            if key in calls[name].inputs:
                assert not condition or key in brought or key in owners
            else:  # not there, or made by a call that waits for this one
                assert name in _reached(owners[key], waits) if key in owners else key not in brought


def _reached(name: str, waits: dict[str, set[str]]) -> set[str]:
    seen, following = set[str](), {name}
    while following:
        seen |= following
        following = {awaited for name in following for awaited in waits[name]} - seen
    return seen


def test_a_key_goes_along_with_the_one_that_it_belongs_to():
    """Also to calls that list their keys, which would otherwise misread the other one."""
    listed = "[packed_input_ids, advantages, loss_mask, old_logprobs, prompt_mask, packed_logprobs]"
    for overrides in ([], [f"graph.actor_train.inputs={listed}"]):
        graph = load_recipe("grpo_guess", overrides).recipe.graph
        readers = [name for name, call in graph.items() if "packed_input_ids" in call.inputs]
        assert "actor_train" in readers
        assert all("forks" in graph[name].inputs for name in readers)
    refuses = load_recipe("grpo_guess", ["graph.actor_gen.interface.args.on_rewrite=refuse"])
    assert all("forks" not in call.inputs for call in refuses.recipe.graph.values())
