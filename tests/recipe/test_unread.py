"""Overrides that nothing reads."""

import pytest

from rlcli.errors import RecipeError, RlcliError
from rlcli.recipe.resolve import load_recipe


@pytest.fixture
def resolved(tmp_path):
    """A recipe in which references are spelt out, as the folder of a run has it."""
    file = tmp_path / "recipe.resolved.yaml"
    file.write_text(load_recipe("ppo_math").to_yaml())
    return str(file)


def settings_of_calls(resolved, override):
    """The keys that a refusal names, of which each call has its own."""
    key = override.partition("=")[0]
    with pytest.raises(RlcliError, match=f"{key} has no effect: each call has its own") as refused:
        load_recipe(resolved, [override])
    assert (refused.value.code, refused.value.exit_code) == ("R42", 2)
    return refused.value.hint.removeprefix("set ").split(", ")


@pytest.mark.parametrize("setting", ["temperature", "top_p", "max_new_tokens"])
def test_a_setting_of_generation_that_calls_have_of_their_own_is_refused(resolved, setting):
    keys = settings_of_calls(resolved, f"generation.{setting}=1")
    assert f"graph.actor_gen.interface.args.generation.{setting}" in keys
    assert ("graph.ref_inf.interface.args.temperature" in keys) == (setting == "temperature")
    assert load_recipe(resolved, [f"{key}=1" for key in keys])


def test_a_setting_of_generation_that_calls_refer_to_or_lack_is_accepted():
    recipe = load_recipe("ppo_math", ["generation.temperature=0.5"]).recipe
    assert recipe.graph["actor_gen"].interface.args["generation"]["temperature"] == 0.5
    assert load_recipe("sft_math", ["generation.max_new_tokens=9"])  # of rlcli eval


@pytest.mark.parametrize(
    "interface", ["generation", "{type: episodes, args: {environment: guess}}"]
)
def test_a_call_without_settings_of_generation_takes_those_of_the_recipe(tmp_path, interface):
    """it sampled one response of up to 256 tokens, whatever plans and checks said"""
    file = tmp_path / "mine.yaml"
    call = f"{{_replace_: true, model: actor, call: generate, interface: {interface}}}"
    file.write_text(f"extends: grpo_math\ngraph: {{actor_gen: {call}}}\n")
    recipe = load_recipe(str(file), ["generation.temperature=0.7"]).recipe
    settings = recipe.graph["actor_gen"].interface.args["generation"]
    assert settings == recipe.graph["actor_train"].interface.args["generation"]
    assert (settings["temperature"], settings["responses_per_prompt"]) == (0.7, 8)


SAMPLER = """\
from dataclasses import dataclass, field

from rlcli.api.model import ModelInterface, register_interface


@dataclass
class Sampling:
    heat: float = 1.0


@dataclass
class Ours(ModelInterface):
    generation: Sampling = field(default_factory=Sampling)

    def generate(self, model, data, mb_spec):
        return data


register_interface("ours", Ours)
"""


def test_settings_of_another_kind_are_left_alone(folder):
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    (folder / "interfaces").mkdir()
    (folder / "interfaces" / "ours.py").write_text(SAMPLER)
    outputs = "[packed_input_ids, prompt_mask, packed_logprobs, seq_no_eos_mask]"
    call = "_replace_: true, model: actor, call: generate, inputs: [packed_prompts]"
    written = f"{{actor_gen: {{{call}, interface: ours, outputs: {outputs}}}}}"
    (folder / "mine.yaml").write_text(f"extends: grpo_math\ngraph: {written}\n")
    assert load_recipe("mine.yaml").recipe.graph["actor_gen"].interface.args == {}


def test_a_setting_of_generation_that_a_single_call_takes_is_accepted(resolved, tmp_path):
    file = tmp_path / "mine.yaml"
    call = "{_replace_: true, model: actor, call: generate, interface: generation}"
    file.write_text(f"extends: recipe.resolved.yaml\ngraph: {{actor_gen: {call}}}\n")
    recipe = load_recipe(str(file), ["generation.temperature=0.5"]).recipe
    assert recipe.graph["actor_gen"].interface.args["generation"]["temperature"] == 0.5


def test_an_unknown_setting_of_generation_is_refused_as_unknown_alone(resolved):
    with pytest.raises(RlcliError, match=r"unknown key generation\.tempratur"):
        load_recipe(resolved, ["generation.tempratur=1"])


@pytest.mark.parametrize(
    ("override", "calls"),
    [
        ("ppo.kl_ctl=0.2", {"advantages": "kl_ctl"}),
        (
            "ppo.generation.temperature=0.9",
            dict.fromkeys(["actor_gen", "actor_train"], "generation.temperature"),
        ),
    ],
)
def test_a_key_of_a_block_that_is_spelt_out_has_those_of_the_calls_as_the_hint(
    resolved, override, calls
):
    with pytest.raises(RecipeError) as refused:
        load_recipe(resolved, [override])
    (problem,) = refused.value.problems
    keys = [f"graph.{call}.interface.args.{argument}" for call, argument in calls.items()]
    assert problem.hint == f"set {', '.join(keys)}"
    value = override.partition("=")[2]
    load_recipe(resolved, [f"{key}={value}" for key in keys])


def test_a_key_of_a_block_that_nothing_refers_to_is_refused():
    with pytest.raises(RlcliError, match=r"R42.*unknown key ppo\.kl_ctrl") as refused:
        load_recipe("ppo_math", ["ppo.kl_ctrl=0.1"])
    assert "kl_ctl" in refused.value.hint
