"""One change of a shipped recipe either works or is refused with one error, and a hint that works.

What built-in layers say of a component that the change replaces vanishes with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hint_following import problems, still_wrong

from rlcli.errors import RecipeError
from rlcli.recipe.parsing.finding import profile_names
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
MESHES = [
    f"ppo_math{cluster} models.actor.mesh.{dimension}={size}"
    for cluster in ("", " launch=local cluster.devices_per_node=8")
    for dimension in ("dp", "tp", "pp", "cp", "ep")
    for size in (2, 3)
]
REMOVED_ROLES = [
    f"{recipe} models.{role}=null"
    for recipe in ("ppo_math", "grpo_math", "sft_math", "dpo_arithmetic", "best_of_n_math")
    for role in ("actor", "critic", "ref", "reward")
]
SINGLE = [
    f"dpo_arithmetic datasets.train={dataset}"
    for dataset in ("prompt_answer", "chat", "plain_text", "arithmetic_demonstrations")
]
"""Rows that are not pairs."""
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
    *REMOVED_ROLES,
    "ppo_math graph.reward_inf=null",
    "ppo_math graph.actor_gen=null",
    "distill_math graph.teacher_inf=null",
    "ppo_math datasets.held_out=null",
    *SINGLE,
    "dpo_arithmetic datasets.train=math_prompts",
    "rm_arithmetic datasets.train=prompt_answer",
    "rm_arithmetic datasets.train=math_prompts",
    "ppo_math datasets.train=paired",
    "sft_math datasets.train=prompt_only",
    "ppo_math models.actor.devices=0-3",
    "ppo_math train.epochs=1",
    "sft_chat train.steps=2",
    "ppo_math models.actor.rollout.mesh.tp=2",
]


@pytest.mark.parametrize("change", CHANGES)
def test_one_change_of_a_shipped_recipe_is_at_most_one_error(change: str):
    recipe, *words = change.split()
    reported = problems(recipe, *words)
    assert len(reported) <= 1, "\n".join(map(str, reported))
    for problem in reported:
        assert "<" not in (problem.hint or "")
        assert still_wrong(recipe, words, problem.hint or "") == []


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
        "extends: dpo_arithmetic\n"
        "models: {ref: {backend: {args: {context_parallel: ring, x: 1}}}}\n"
    )
    engine = "models.ref.backend=deepspeed"
    (problem,) = problems(str(mine), engine)
    assert (
        problem.what == "models.ref.backend is deepspeed; it has no argument context_parallel or x"
    )
    dropped = ["models.ref.backend.args.context_parallel=null", "models.ref.backend.args.x=null"]
    assert problem.hint == f"remove what it does not have: {' '.join(dropped)}"
    assert problems(str(mine), engine, *dropped) == []


def test_the_users_length_of_training_replaces_that_of_a_built_in_layer(tmp_path: Path):
    train = load_recipe("ppo_math", ["train.epochs=2"]).recipe.train
    assert (train.steps, train.epochs) == (None, 2)
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: ppo_math\ntrain: {epochs: 2}\n")
    assert load_recipe(str(mine)).recipe.train.steps is None
    (problem,) = problems(str(mine), "train.steps=3")
    assert problem.code == "R47", "both are the user's"


def test_a_reference_to_the_length_that_was_replaced_is_refused(tmp_path: Path):
    setting = "models.actor.backend.args.warmup_steps=${train.steps}"
    load_recipe("ppo_math", [setting])
    with pytest.raises(RecipeError, match=r"R61.*\$\{train.steps\}.*because train.epochs is"):
        load_recipe("ppo_math", ["train.epochs=2", setting])


def test_a_length_that_is_a_reference_is_the_users(tmp_path: Path):
    settings = ["train.epochs=2", "train.steps=${train.prompts_per_step}"]
    with pytest.raises(RecipeError, match=r"R47.*train has both steps and epochs"):
        load_recipe("ppo_math", settings)


def test_null_leaves_the_length_of_training_to_the_built_in_layer(tmp_path: Path):
    steps = load_recipe("ppo_math").recipe.train.steps
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: ppo_math\ntrain: {epochs: 2}\n")
    train = load_recipe(str(mine), ["train.epochs=null"]).recipe.train
    assert (train.steps, train.epochs) == (steps, None)
    train = load_recipe(str(mine), ["train.steps=null"]).recipe.train
    assert (train.steps, train.epochs) == (None, 2)


@pytest.mark.parametrize("engine", ["inference", "sglang", "vllm", "deepspeed"])
def test_another_engine_is_one_error_whatever_arguments_the_user_wrote_for_the_first(
    engine: str, tmp_path: Path
):
    mine = tmp_path / "mine.yaml"
    arguments = "{lr: 1e-5, dtype: float32, offload_optimizer: true, beta3: 1}"
    mine.write_text(f"extends: sft_math\nmodels: {{actor: {{backend: {{args: {arguments}}}}}}}\n")
    reported = problems(str(mine), f"models.actor.backend={engine}")
    assert len(reported) == 1, "\n".join(map(str, reported))


def test_the_users_arguments_of_a_rollout_vanish_with_an_engine_that_cannot_generate(
    tmp_path: Path,
):
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: ppo_math\nmodels: {actor: {rollout: {backend: {args: {kv_cache_tokens: 9}}}}}\n"
    )
    (problem,) = problems(str(mine), "models.actor.rollout.backend=megatron")
    assert problem.what.startswith("the backend megatron of models.actor.rollout cannot generate")


def test_rows_of_single_sequences_are_refused_where_pairs_are_compared():
    (problem,) = problems("dpo_arithmetic", "datasets.train=prompt_answer")
    assert problem.what == (
        "rows of datasets.train (prompt_answer) have one sequence each, but dpo_train compares "
        "pairs"
    )
    assert (problem.hint or "").endswith("datasets.train=arithmetic_pairs")
    rows = "datasets.train={type: hf, args: {path: hf:owner/rows, kind: prompt_answer}}"
    assert [problem.code for problem in problems("dpo_arithmetic", rows)] == ["R71"]
    assert problems("dpo_arithmetic", rows.replace("prompt_answer", "paired")) == []
    assert problems("dpo_arithmetic", rows.replace("prompt_answer", "auto")) == []


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
        ("grpo_math", "async", "recipes that extend base/ppo, and grpo_math", "--with async_grpo"),
        ("ppo_math", "async_grpo", "recipes that extend base/grpo, and ppo_math", "--with async?"),
        (
            "sft_math",
            "dapo",
            "recipes that extend base/grpo, and sft_math",
            "profiles that fit: gpu1",
        ),
    ],
)
def test_a_profile_of_another_algorithm_is_refused_with_one_that_fits(
    recipe: str, profile: str, message: str, hint: str
):
    (problem,) = problems(recipe, "--with", profile)
    assert message in problem.what
    assert hint in (problem.hint or "")


def test_profiles_that_fit_find_the_calls_that_they_change():
    (problem,) = problems("sft_math", "--with", "dapo")
    assert problem.hint == "profiles that fit: gpu1, gpu8"
    (problem,) = problems("distill_math", "--with", "dapo")
    assert problem.hint == "profiles that fit: gpu1, gpu8, judge, sglang, vllm"


def test_a_profile_may_bring_a_base_or_a_block_of_its_own(tmp_path: Path):
    layer = tmp_path / "own.yaml"
    layer.write_text(
        'judge: {timeout_s: 3.0}\ngraph: {reward_inf: {interface: {args: "${judge}"}}}\n'
    )
    assert problems("ppo_math", "--with", str(layer)) == []
    assert {"async", "async_grpo"} <= profile_names().keys()


@pytest.mark.parametrize(
    ("setting", "reason", "profile"),
    [
        ("train.max_redraws=3", "no call drops prompts", "dapo"),
        ("train.take_first=freshest", "no call samples ahead of training", "async_grpo"),
        ("train.max_segments=1", "no call samples ahead of training", "async_grpo"),
        ("train.prompts_per_draw=4", "no call drops prompts, and none samples them", "dapo"),
    ],
)
def test_settings_of_draws_are_refused_where_they_have_no_effect(setting, reason, profile):
    (problem,) = problems("grpo_math", setting)
    assert f"has no effect: {reason}" in problem.what
    key = setting.partition("=")[0]
    assert problem.hint == f"{key}=null removes it"
    assert problems("grpo_math", f"{key}=null") == []
    assert problems("grpo_math", "--with", profile, setting) == []
    assert problems("grpo_math", "train.max_redraws=10", "train.take_first=oldest") == []


def test_staleness_of_samples_that_no_call_makes_is_refused():
    (problem,) = problems("sft_math", "train.max_staleness=2")
    assert "train.max_staleness has no effect: no call samples" in problem.what
    assert problem.hint == "train.max_staleness=null removes it"
    assert problems("sft_math", "train.max_staleness=0") == []


def test_a_setting_without_effect_of_a_runs_own_recipe_is_not_refused(tmp_path):
    recipe = tmp_path / "recipe.resolved.yaml"
    recipe.write_text("extends: sft_math\ntrain: {max_staleness: 2}\n")
    assert load_recipe(str(recipe)).recipe.train.max_staleness == 2
    assert [problem.code for problem in problems(str(recipe), "train.max_staleness=3")] == ["R71"]


def test_evaluations_during_a_run_without_a_dataset_are_refused():
    (problem,) = problems("sft_math", "train.eval.every_steps=5")
    assert "train.eval.every_steps has no effect" in problem.what
    held_out = "datasets.held_out={type: arithmetic_demonstrations, args: {held_out: true}}"
    assert (
        problems("sft_math", "train.eval.every_steps=5", "train.eval.dataset=held_out", held_out)
        == []
    )
    assert problems("ppo_math", "train.eval.dataset=null") == []


@pytest.mark.parametrize(
    ("overrides", "near"),
    [
        (("datasets.trian=arithmetic_demonstrations",), "train"),
        (("datasets.train2=arithmetic_demonstrations", "train.dataset=train2"), None),
        (("datasets.probe=arithmetic_demonstrations",), None),
    ],
)
def test_a_dataset_of_the_command_line_that_is_almost_a_used_one_is_refused(
    overrides: tuple[str, ...], near: str | None
):
    hints = [problem.hint for problem in problems("sft_math", *overrides)]
    assert hints == ([f"did you mean {near}?"] if near else [])


HELD_OUT = (
    "train.eval.dataset=held_out",
    "datasets.held_out={type: arithmetic_demonstrations, args: {held_out: true}}",
)


@pytest.mark.parametrize(
    ("recipe", "overrides", "fault"),
    [
        ("sft_math", HELD_OUT, "uses eval/accuracy, which the evaluation does not report"),
        ("grpo_guess", (), "uses eval/accuracy, which the evaluation does not report"),
        ("ppo_math", ("checkpoint.best_metric=eval/rewrad",), "uses eval/rewrad, which the eval"),
        ("ppo_math", ("checkpoint.best_metric=reward",), "uses reward, which no step reports"),
        ("ppo_math", ("checkpoint.best_metric=actr/loss",), "uses actr/loss, which no step"),
        ("ppo_math", (), "but only the last is of an evaluated step"),
        ("ppo_math", ("train.eval.every_steps=null", "checkpoint.every_steps=5"), "only the last"),
    ],
)
def test_the_best_checkpoints_by_a_metric_that_none_has_are_refused(
    recipe: str, overrides: tuple[str, ...], fault: str
):
    (problem,) = problems(recipe, "checkpoint.keep_best=1", *overrides)
    assert problem.what.startswith("checkpoint.keep_best ")
    assert fault in problem.what
    assert problems(recipe, *overrides) == []


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("sft_math", (*HELD_OUT, "checkpoint.best_metric=eval/loss", "train.eval.every_steps=5")),
        ("rm_arithmetic", ("checkpoint.best_metric=eval/margin",)),
        ("ppo_math", ("checkpoint.best_metric=eval/pass@4",)),
        ("ppo_math", ("checkpoint.best_metric=eval/eval_reward/reward",)),
        ("ppo_math", ("checkpoint.best_metric=reward/reward", "train.eval.dataset=null")),
    ],
)
def test_the_best_checkpoints_by_a_metric_that_is_reported_are_kept(
    recipe: str, overrides: tuple[str, ...]
):
    settings = ("checkpoint.keep_best=1", "checkpoint.every_steps=5", *overrides)
    assert problems(recipe, *settings) == []
