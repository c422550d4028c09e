"""One change of a shipped recipe either works or is refused with one error, and a hint that works.

What built-in layers say of a component that the change replaces vanishes with it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlcli.errors import Problem, RecipeError
from rlcli.recipe.parsing.layers import profile_names
from rlcli.recipe.resolve import load_recipe

ENGINES = [
    f"ppo_math models.{role}.backend={engine}"
    for role in ("actor", "critic", "ref")
    for engine in ("fsdp", "deepspeed", "megatron", "inference", "sglang", "vllm", "null")
]
OTHER_RECIPES = [
    f"{recipe} models.actor.backend={engine}"
    for recipe in ("sft_math", "grpo_math", "dpo_arithmetic", "best_of_n_math")
    for engine in ("megatron", "inference", "sglang")
]
MESHES = [f"ppo_math models.actor.mesh.{size}=2" for size in ("dp", "tp", "pp", "cp", "ep")]
PROFILES = [
    f"{recipe} --with {profile}"
    for recipe in ("ppo_math", "grpo_math", "dpo_arithmetic", "sft_math")
    for profile in ("async", "async_grpo", "dapo", "gpu8", "sglang")
]
CHANGES = [
    *ENGINES,
    *OTHER_RECIPES,
    *MESHES,
    *PROFILES,
    "rlhf_arithmetic models.reward.backend=null",
    "ppo_math models.reward.backend=fsdp",
    "rm_arithmetic models.actor.backend=inference",
    "dpo_arithmetic datasets.train=arithmetic",
    "sft_math datasets.train=arithmetic",
    "rm_arithmetic datasets.train=arithmetic",
    "ppo_math datasets.train=arithmetic_pairs",
    "ppo_math datasets.held_out=arithmetic_pairs",
    "ppo_math datasets.train=prompt_only",
    "ppo_math datasets.train=gsm8k",
    "dpo_arithmetic datasets.train=packed_rw_pair",
    "ppo_math graph.reward_inf.interface=llm_judge",
    "ppo_math graph.reward_inf.interface=hf_reward",
    "ppo_math graph.reward_inf.interface=code_reward",
    "ppo_math graph.actor_train.interface=dpo",
    "ppo_math graph.actor_train.interface=ppo",
    "ppo_math graph.advantages.interface=group_relative",
    "dpo_arithmetic graph.dpo_train.interface=reward_model",
    "sft_math graph.train.interface=ppo_actor",
    "ppo_math models.critic.head=lm",
    "ppo_math models.actor.head=value",
    "rm_arithmetic models.actor.head=lm",
    "ppo_math models.actor.path=null",
    "sft_math models.actor.scratch.model_type=qwen2",
    "sft_math models.actor.scratch.model_type=gpt2",
    "sft_math models.actor.scratch.model_type=mixtral",
    "ppo_math launch=ray",
    "ppo_math launch=slurm",
    "ppo_math cluster.devices_per_node=8",
    "ppo_math models.ref=null",
    "ppo_math graph.ref_inf=null",
    "ppo_math models.critic=null",
    "ppo_math graph.critic_train=null",
    "ppo_math train.eval.dataset=null",
    "distill_math models.teacher=null",
    "sft_math models.actor.backend.args.lora=8",
]


ABSENT = "lora=8"
"""What rlcli does not have; the hint says what comes nearest instead."""


def problems(*words: str) -> list[Problem]:
    recipe, *overrides = words
    profiles = []
    while "--with" in overrides:
        at = overrides.index("--with")
        profiles.append(overrides[at + 1])
        del overrides[at : at + 2]
    try:
        load_recipe(recipe, overrides, profiles)
    except RecipeError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("change", CHANGES)
def test_one_change_of_a_shipped_recipe_is_at_most_one_error(change: str):
    recipe, *words = change.split()
    reported = problems(recipe, *words)
    assert len(reported) <= 1, "\n".join(map(str, reported))
    for problem in reported:
        assert "<" not in (problem.hint or "")
        followed = followed_overrides(problem.hint or "")
        assert not followed or problem.what not in [
            again.what for again in problems(recipe, *with_overrides(words, followed))
        ]


def followed_overrides(hint: str) -> list[str]:
    """The overrides and profiles that a hint consists of or names."""
    profiles = re.findall(r"--with (\w+)", hint)
    if profiles:
        return ["--with", profiles[0]]
    return [
        word.rstrip(",;")
        for word in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)*=[^\s;,]+", hint)
        if "…" not in word and not re.search(r"=[A-Z]+$", word)
    ]


def with_overrides(words: list[str], followed: list[str]) -> list[str]:
    """The command line after the hint: the last value of a key counts, as does a profile."""
    keys = {word.partition("=")[0] for word in followed}
    keys |= {word.partition("=")[0] for word in words if word.endswith(ABSENT)}
    if followed[:1] == ["--with"]:
        return followed
    return [word for word in words if word.partition("=")[0] not in keys] + followed


@pytest.mark.parametrize("key", ["models.actor.backend", "models.actor.backend.type"])
def test_built_in_arguments_of_an_engine_vanish_with_it(key: str):
    (problem,) = problems("sft_math", f"{key}=inference")
    assert problem.what == (
        "the backend inference of models.actor cannot train, which graph.sft_train asks of it"
    )
    backend = load_recipe("sft_math", [f"{key}=deepspeed"]).recipe.models["actor"].backend
    assert backend is not None
    assert backend.args["lr"] == 3e-3, "the arguments that the new engine has stay"


def test_the_users_arguments_of_another_engine_are_one_error(tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: dpo_arithmetic\nmodels: {ref: {backend: {args: {dtype: float32, x: 1}}}}\n"
    )
    server = ["models.ref.backend=sglang", "graph.ref_inf.interface.args.temperature=1.0"]
    reported = problems(str(mine), *server)
    assert [problem.what for problem in reported if "takes no" in problem.what] == [
        "models.ref.backend is sglang, which takes no dtype, x"
    ]
    drop = "models.ref.backend.args=null"
    assert [problem.hint for problem in reported if "takes no" in problem.what] == [
        f"drop what it does not take: {drop}"
    ]
    assert not any("takes no" in problem.what for problem in problems(str(mine), *server, drop))


def test_an_argument_that_is_written_with_its_engine_is_still_an_unknown_key(tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: ppo_math\nmodels: {ref: {backend: {type: inference, args: {lr: 1e-5}}}}\n"
    )
    assert [problem.code for problem in problems(str(mine))] == ["R43"]
    on_top = problems("ppo_math", "models.ref.backend=inference", "models.ref.backend.args.lr=1e-5")
    assert [problem.code for problem in on_top] == ["R43"]


def test_rows_without_the_keys_that_calls_read_are_one_error_of_the_dataset():
    (problem,) = problems("dpo_arithmetic", "datasets.train=arithmetic")
    assert (problem.code, problem.where) == ("R71", "command line")
    assert problem.what == (
        "rows of datasets.train (arithmetic) have packed_prompts, but ref_inf and dpo_train read "
        "packed_input_ids and prompt_mask"
    )
    assert problem.hint == (
        "rows of arithmetic_pairs, which it replaces, have them: datasets.train=arithmetic_pairs"
    )


@pytest.mark.parametrize(
    ("recipe", "profile", "message", "hint"),
    [
        ("grpo_math", "async", "recipes over base/ppo, which grpo_math", "--with async_grpo"),
        ("ppo_math", "async_grpo", "recipes over base/grpo, which ppo_math", "--with async?"),
        ("sft_math", "dapo", "recipes over base/grpo, which sft_math", "profiles that fit: gpu1"),
    ],
)
def test_a_profile_of_another_algorithm_is_refused_with_one_that_fits(
    recipe: str, profile: str, message: str, hint: str
):
    (problem,) = problems(recipe, "--with", profile)
    assert message in problem.what
    assert hint in (problem.hint or "")


def test_a_profile_may_bring_a_base_or_a_block_of_its_own(tmp_path: Path):
    layer = tmp_path / "own.yaml"
    layer.write_text(
        'judge: {timeout_s: 3.0}\ngraph: {reward_inf: {interface: {args: "${judge}"}}}\n'
    )
    assert problems("ppo_math", "--with", str(layer)) == []
    assert {"async", "async_grpo"} <= profile_names().keys()
