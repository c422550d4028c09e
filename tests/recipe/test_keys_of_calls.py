"""A call's inputs and outputs against what the class of its interface declares that it reads and
writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlcli import registry
from rlcli.api.declared_keys import DeclaredKeys, declared_keys
from rlcli.errors import RecipeError
from rlcli.recipe.resolve import load_recipe

ROLLOUT = "packed_input_ids, prompt_mask, packed_logprobs, seq_no_eos_mask"


def problems(text: str, folder: Path, *overrides: str) -> list[tuple[str | None, str, str | None]]:
    (folder / "bad.yaml").write_text(f"extends: ppo_math\n{text}")
    with pytest.raises(RecipeError) as caught:
        load_recipe("bad.yaml", overrides)
    assert {problem.code for problem in caught.value.problems} == {"R71"}
    return [(problem.where, problem.what, problem.hint) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "where", "message", "hint"),
    [
        (
            "graph: {reward_inf: {inputs: [packed_input_ids]}}",
            "2:30",
            "graph.reward_inf lacks the input prompt_mask, which inference of math_reward reads",
            "add it to its inputs (actor_gen makes it)",
        ),
        (
            f"graph: {{advantages: {{inputs: [{ROLLOUT}, rewards, values]}}}}",
            "2:30",
            "graph.advantages lacks the input packed_ref_logprobs, which inference of gae reads",
            "add it to its inputs (ref_inf makes it), or change kl_ctl",
        ),
        (
            "graph: {critic_train: {inputs: [packed_input_ids, prompt_mask, values, returns]}}",
            "2:32",
            "graph.critic_train lacks the input loss_mask, which train_step of ppo_critic reads",
            "add it to its inputs (advantages makes it)",
        ),
        (
            "graph: {critic_train: {inputs: [rewards]}}",
            "2:32",
            (
                "graph.critic_train lacks the input packed_input_ids, values, returns, loss_mask, "
                "which train_step of ppo_critic reads"
            ),
            "add all to its inputs",
        ),
        (
            "graph: {critic_inf: {outputs: [value]}}",
            "2:32",
            "graph.critic_inf lists the output value, which inference of ppo_critic does not write",
            "did you mean values?",
        ),
        (
            "graph: {critic_inf: {outputs: [values, entropy]}}",
            "2:40",
            (
                "graph.critic_inf lists the output entropy, which inference of "
                "ppo_critic does not write"
            ),
            "it writes values",
        ),
        (
            "graph: {actor_train: {outputs: [loss]}}",
            "2:33",
            "graph.actor_train lists the output loss, which train_step of ppo_actor does not write",
            "train_step returns numbers for the log",
        ),
        (
            "train: {eval: {graph: {eval_reward: {inputs: [packed_input_ids]}}}}",
            "2:46",
            (
                "train.eval.graph.eval_reward lacks the input prompt_mask, which "
                "inference of math_reward reads"
            ),
            "add it to its inputs (eval_gen makes it)",
        ),
        (
            "graph: {reward_inf: {input_key_remap: {prompt_mask: mask}}}",
            None,
            "graph.reward_inf lacks the input prompt_mask, which inference of math_reward reads",
            "its input_key_remap renames prompt_mask to mask",
        ),
    ],
)
def test_wrong_keys_are_one_problem_with_a_hint(
    folder: Path, text: str, where: str | None, message: str, hint: str
):
    (problem,) = problems(text, folder)
    assert problem[1:] == (message, hint)
    assert where is None or problem[0] == f"bad.yaml:{where}"


def test_a_misspelt_input_is_one_problem(folder: Path):
    reported = problems("graph: {reward_inf: {inputs: [packed_input_ids, prompt_msk]}}", folder)
    assert reported == [
        (
            "bad.yaml:2:49",
            "reward_inf reads prompt_msk, which neither a call nor the dataset provides",
            "did you mean prompt_mask?",
        )
    ]


def test_arguments_decide_which_keys_are_read(folder: Path):
    lists = f"graph: {{advantages: {{inputs: [{ROLLOUT}, packed_ref_logprobs, rewards, values]}}}}"
    (problem,) = problems(f"{lists}\nppo: {{recompute_logprob: true}}", folder)
    assert "graph.advantages lacks the input proximal_logprobs" in problem[1]
    assert problem[2] == "add it to its inputs, or change recompute_logprob"
    without = f"graph.advantages.inputs=[{ROLLOUT}, rewards, values]"
    load_recipe("ppo_math", ["ppo.kl_ctl=0.0", without])
    load_recipe(
        "ppo_math", ["ppo.disable_value=true", without.replace(", values", ", packed_ref_logprobs")]
    )


def test_renamed_keys_are_compared_under_the_interfaces_names(folder: Path):
    text = f"""\
graph:
  critic_inf: {{output_key_remap: {{values: old_values}}}}
  advantages:
    inputs: [{ROLLOUT}, packed_ref_logprobs, rewards, old_values]
    input_key_remap: &new {{old_values: values}}
  critic_train:
    inputs: [packed_input_ids, old_values, returns, loss_mask]
    input_key_remap: *new
"""
    (folder / "good.yaml").write_text(f"extends: ppo_math\n{text}")
    load_recipe("good.yaml")


SILENT = """
from dataclasses import dataclass
from rlcli.api import model as model_api

@dataclass
class Silent(model_api.ModelInterface):
    {declaration}
    def inference(self, model, data, mb_spec):
        return data

model_api.register_interface("silent", Silent)
"""


@pytest.mark.parametrize(
    "declaration",
    [
        "",
        'READS = {"train_step": ("x",)}',
        "READS = WRITES = make()",
        'READS = {"inference": ("a if",)}',
    ],
)
def test_keys_of_an_interface_without_declarations_must_be_listed(folder: Path, declaration: str):
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    (folder / "interfaces").mkdir()
    (folder / "interfaces" / "silent.py").write_text(SILENT.format(declaration=declaration))
    lists = "inputs: [packed_input_ids], outputs: [rewards]"
    text = f"graph: {{reward_inf: {{interface: {{_replace_: true, type: silent}}, {lists}}}}}\n"
    (folder / "good.yaml").write_text(f"extends: ppo_math\n{text}")
    load_recipe("good.yaml")
    (folder / "bad.yaml").write_text(
        "extends: good.yaml\ngraph: {reward_inf: {inputs: null, outputs: null}}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe("bad.yaml")
    (problem,) = caught.value.problems  # the evaluation's call is the same one
    assert (problem.code, problem.where) == ("R39", "good.yaml:2:57")
    assert problem.what.startswith(
        "graph.reward_inf lists no inputs and no outputs, and silent does not declare"
    )
    assert problem.hint is not None
    assert problem.hint.startswith("list the keys, or declare them in its class: READS = {")


def test_conditional_entries_are_resolved_with_the_arguments():
    arguments = {"kl": 0.1, "off": 0, "text": "response", "none": None}
    entries = [
        "a",
        "b if kl",
        "c if off",
        "d unless none",
        "e if text=full",
        "e if text=response",
        "f if given",
    ]
    keys = declared_keys([*entries, "g unless unknown", "b if given"], arguments.__getitem__)
    due_to = {"b": "kl", "d": "none", "e": "text"}
    assert keys == DeclaredKeys(
        ("a", "b", "d", "e"), ("c", "f", "g"), due_to, if_given=("f", "g"), up_to={"c": "off"}
    )
    for entry in ("", "a b", "a if", "a if x y", "a when x", "above a b"):
        with pytest.raises(ValueError, match="is not a valid key"):
            declared_keys([entry], arguments.__getitem__)


@dataclass
class Settings:
    replay: bool


def test_a_condition_can_be_an_entry_of_an_argument():
    """A mapping as in a recipe, or the settings that an interface makes of it."""
    arguments = {
        "on": {"replay": True},
        "unset": {},
        "built": Settings(True),
        "off": Settings(False),
    }
    entries = ["a if on.replay", "b if unset.replay", "c if built.replay", "d if off.replay"]
    keys = declared_keys([*entries, "e if unknown.replay"], arguments.__getitem__)
    assert keys.needed == ("a", "c")
    assert keys.due_to == {"a": "on.replay", "c": "built.replay"}
    assert keys.if_given == ("e",)
    with pytest.raises(AttributeError, match="repaly"):
        declared_keys(["a if built.repaly"], arguments.__getitem__)


def test_entries_can_take_keys_from_an_argument():
    arguments = {"weights": {"a": 1.0, "b": 0.1}, "listed": ["c"], "number": 3}
    entries = [
        "d",
        "each of weights",
        "each of listed",
        "each of number",
        "each of unknown",
        "b if given",
    ]
    keys = declared_keys(entries, arguments.__getitem__)
    assert keys == DeclaredKeys(
        ("d", "a", "b", "c"), (), {"a": "weights", "b": "weights", "c": "listed"}
    )
    for entry in ("each of", "each of a b", "each weights"):
        with pytest.raises(ValueError, match="is not a valid key"):
            declared_keys([entry], arguments.__getitem__)


def test_an_entry_can_be_the_number_after_an_argument():
    arguments = {"best": 3, "unset": None, "text": "response", "off": 0}
    entries = ["2", "above best", "above best if off", "above unset", "above text", "above unknown"]
    keys = declared_keys(entries, arguments.__getitem__)
    assert keys == DeclaredKeys(("2", "4"), (), {"4": "best"})


def test_declarations_of_base_classes_are_inherited():
    """Alike for who reads the source and for who has the class."""
    for name in ("ppo_actor", "ppo_critic"):
        read = registry.signature("interfaces", name).constants["READS"]
        interface = registry.load("interfaces", name)()
        assert set(read) >= {"train_step", "inference"}
        for call, entries in read.items():
            assert interface.reads(call) == declared_keys(
                entries, lambda key, of=interface: getattr(of, key)
            )
    assert interface.writes("train_step") is None


@pytest.mark.parametrize("base", ["ppo", "grpo"])
def test_an_adaptive_penalty_with_staleness_needs_recomputed_log_probs(base):
    """The KL of the trained policy, which it follows, is otherwise known only after the loss has
    used the weight."""
    adaptive = [f"{base}.adaptive_kl_ctl=true"]
    stale = [*adaptive, "train.max_staleness=1"]
    load_recipe(f"{base}_math", adaptive)
    with pytest.raises(RecipeError) as caught:
        load_recipe(f"{base}_math", stale)
    assert caught.value.exit_code == 2
    (problem,) = [problem.what for problem in caught.value.problems]
    assert "adaptive_kl_ctl of advantages needs recompute_logprob or use_decoupled_loss" in problem
    interface = {"type": "ppo_actor", "args": f"${{{base}}}"}
    recomputing = {"model": "actor", "call": "inference", "interface": interface}
    recomputing |= {"output_key_remap": {"packed_logprobs": "proximal_logprobs"}}
    recomputed = [f"{base}.recompute_logprob=true", f"graph.own_inf={json.dumps(recomputing)}"]
    load_recipe(f"{base}_math", [*stale, *recomputed])
