"""Other frameworks' words lead to keys that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcli import registry
from rlcli.errors import RecipeError
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import Recipe
from rlcli.recipe.schema_types import annotation_at, field_at
from rlcli.recipe.synonyms import SYNONYMS, translated
from rlcli.recipe.validation.argument_words import argument_words

NAMES = {"<role>": "actor", "<name>": "train", "<call>": "reward_inf"}
ARGUMENTS = {
    "models": ("backends", ["fsdp"]),
    "datasets": ("datasets", ["math_prompts"]),
    "graph": ("interfaces", ["hf_reward"]),
}


@pytest.mark.parametrize("target", sorted({*SYNONYMS.values()} - {"extends"}))
def test_every_synonym_leads_to_an_existing_key(target):
    path = tuple(NAMES.get(word, word) for word in target.split("."))
    if "args" in path:
        kind, components = ARGUMENTS[path[0]]
        for component in components:
            assert path[-1] in {
                argument.name for argument in registry.signature(kind, component).arguments
            }
    else:
        annotation = annotation_at(Recipe, path[:-1])
        assert field_at(annotation, path[-1]) is not None or annotation_at(Recipe, path) is not None


@pytest.mark.parametrize("interface", registry.names("interfaces"))
def test_interfaces_declare_synonyms_only_for_their_own_arguments(interface):
    signature = registry.signature("interfaces", interface)
    words = signature.constants.get("SYNONYMS", {})
    assert set(words) <= {argument.name for argument in signature.arguments}
    elsewhere = [word for text in words.values() for word in text.split()]
    assert len(set(elsewhere)) == len(elsewhere)
    assert not set(elsewhere) & set(SYNONYMS)


def test_synonyms_are_in_lower_case():
    words = [*SYNONYMS, *argument_words(load_recipe("ppo_math").written)]
    assert [word for word in words if word != word.lower()] == []


@pytest.mark.parametrize(
    ("key", "target"),
    [
        ("algorithm.kl_ctrl.kl_coef", "ppo.kl_ctl"),
        ("algorithm.kl_ctrl.type", "ppo.adaptive_kl_ctl"),
        ("algorithm.gamma", "ppo.discount"),
        ("actor_rollout_ref.rollout.n", "generation.responses_per_prompt"),
        ("actor_rollout_ref.actor.optim.lr", "models.actor.backend.args.lr"),
        ("actor_rollout_ref.model.path", "models.actor.path"),
        ("critic.model.path", "models.critic.path"),
        ("reward_model.model.path", "graph.<call>.interface.args.path"),
        ("actor_rollout_ref.rollout.name", "models.actor.rollout"),
        ("actor_rollout_ref.rollout.temperature", "generation.temperature"),
        ("actor_rollout_ref.rollout.top_p", "generation.top_p"),
        ("critic.optim.lr", "models.critic.backend.args.lr"),
        ("data.train_batch_size", "train.prompts_per_step"),
        ("data.max_response_length", "generation.max_new_tokens"),
        ("trainer.n_gpus_per_node", "cluster.devices_per_node"),
        ("trainer.total_epochs", "train.epochs"),
        ("exp_ctrl.save_freq_steps", "checkpoint.every_steps"),
        ("saver.freq_steps", "checkpoint.every_steps"),
        ("gconfig.n_samples", "generation.responses_per_prompt"),
        ("grpo.num_generations_per_prompt", "generation.responses_per_prompt"),
        ("policy.train_global_batch_size", "train.prompts_per_step"),
        ("per_device_train_batch_size", "train.prompts_per_step"),
        ("num_generations", "generation.responses_per_prompt"),
        ("algorithm.adv_estimator", "graph.advantages.interface.type"),
        ("cutoff_len", "datasets.<name>.args.max_length"),
        ("sequence_len", "datasets.<name>.args.max_length"),
        ("base_model", "models.actor.path"),
        ("zzz", None),
    ],
)
def test_keys_of_other_frameworks_are_translated(key, target):
    words = argument_words(load_recipe("ppo_math").written)
    assert translated(key.split("."), words, ["actor", "critic", "ref", "reward"]) == target


def test_an_arguments_synonym_applies_only_if_the_recipe_has_it():
    """In the block that a call takes its arguments from, or at the call;
    nowhere without such an interface."""
    at_the_calls = [
        f"graph.{call}.interface={{_replace_: true, type: ppo_critic, args: {{value_norm: false}}}}"
        for call in ("critic_inf", "critic_train")
    ]
    words = argument_words(load_recipe("ppo_math", at_the_calls).written)
    assert words["vf_clip"] == "graph.critic_inf.interface.args.value_eps_clip"
    assert argument_words(load_recipe("ppo_math").written)["vf_clip"] == "ppo.value_eps_clip"
    assert argument_words(load_recipe("sft_math").written) == {}
    assert translated(["kl_coef"]) is None


def refusals(*overrides: str) -> list[tuple[str, str | None, str | None]]:
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", overrides)
    return [(p.code, p.where, p.hint) for p in caught.value.problems]


def test_synonyms_on_the_command_line_are_translated(folder: Path):
    assert refusals("algorithm.kl_ctrl.kl_coef=0.1") == [
        ("R42", "command line", '"kl_ctrl.kl_coef" is called ppo.kl_ctl in rlcli')
    ]
    assert refusals("+trainer.nnodes=2") == [("R41", "command line", "write cluster.nodes=2")]
    assert refusals("++train.steps=2") == [("R41", "command line", "write train.steps=2")]


def test_a_pasted_section_is_translated_key_by_key(folder: Path):
    (folder / "verl.yaml").write_text(
        "extends: ppo_math\nactor_rollout_ref:\n  actor: {optim: {lr: 1e-6}, zap: "
        "3}\n  rollout: {n: 8}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe("verl.yaml")
    words = {p.where: (p.hint or "").rpartition("is called ")[2] for p in caught.value.problems}
    hints = {where: word.removesuffix(" in rlcli") for where, word in words.items()}
    assert hints == {
        "verl.yaml:3:19": "models.actor.backend.args.lr",
        "verl.yaml:3:30": "",
        "verl.yaml:4:13": "generation.responses_per_prompt",
    }


def test_a_key_without_its_section_gets_a_suggestion(folder: Path):
    """Below a role, in a block, or among a component's arguments."""
    assert refusals("kl_ctl=0.1") == [("R43", "command line", "did you mean ppo.kl_ctl?")]
    assert refusals("actor.path=x") == [("R43", "command line", "did you mean models.actor?")]
    assert refusals("actor_gen.model=x") == [
        ("R43", "command line", "did you mean graph.actor_gen?")
    ]


def test_a_key_that_a_reference_carries_elsewhere_is_one_problem():
    """The evaluation's graph takes its reward from that of training."""
    with pytest.raises(RecipeError) as caught:
        load_recipe("grpo_math", ["graph.reward_inf.interface={type: math_reward, args: {fil: 1}}"])
    (problem,) = caught.value.problems
    assert problem.code == "R42"
    assert problem.hint.startswith("valid here: ")
