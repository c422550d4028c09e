"""Overrides that nothing reads."""

import pytest

from rlcli.errors import RlcliError
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


def test_an_unknown_setting_of_generation_is_refused_as_unknown_alone(resolved):
    with pytest.raises(RlcliError, match=r"unknown key generation\.tempratur"):
        load_recipe(resolved, ["generation.tempratur=1"])


def test_a_key_of_a_block_that_nothing_refers_to_is_refused():
    with pytest.raises(RlcliError, match=r"R42.*unknown key ppo\.kl_ctrl") as refused:
        load_recipe("ppo_math", ["ppo.kl_ctrl=0.1"])
    assert "kl_ctl" in refused.value.hint
