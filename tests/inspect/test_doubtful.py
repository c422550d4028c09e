"""Recipes that are valid but probably a mistake."""

import pytest

from rlcli.inspect.doubtful import recipe_warnings
from rlcli.recipe.resolve import load_recipe

BEHIND = (
    "models.sampler={init: actor, backend: inference}",
    "graph.actor_gen.model=sampler",
    "cluster.device=cuda",
)


def test_a_sampler_that_never_follows_the_trained_role_causes_a_warning():
    (warning,) = recipe_warnings(load_recipe("ppo_math", BEHIND))
    assert warning == (
        "command line: each step actor_gen samples with the weights that sampler began with, while "
        "actor is trained; graph.actor_train.hooks.copy_to=sampler makes it follow"
    )


def test_a_sampler_that_follows_the_trained_role_causes_no_warning():
    assert not list(
        recipe_warnings(
            load_recipe("ppo_math", [*BEHIND, "graph.actor_train.hooks.copy_to=sampler"])
        )
    )
    assert not list(recipe_warnings(load_recipe("ppo_math", ["cluster.device=cuda"])))


def test_a_warm_up_that_does_not_end_causes_a_warning():
    (warning,) = recipe_warnings(
        load_recipe("dpo_arithmetic", ["models.actor.backend.args.warmup_steps=60"])
    )
    assert "the learning rate of actor rises for 60 steps, and the run has 60" in warning


def test_scores_of_a_head_that_nothing_trained_cause_a_warning():
    (warning,) = recipe_warnings(
        load_recipe("rlhf_arithmetic", ["models.reward.path=recipe:sft_math#actor"])
    )
    assert "reward gives every text the value 0: sft_math trains a model" in warning
    resolved = load_recipe("ppo_math", ["graph.critic_train=null"])  # it starts as the actor does
    (warning,) = recipe_warnings(resolved)
    assert f"{resolved.origin('models.critic.init')}: critic gives every text the value" in warning


@pytest.mark.parametrize("setting", ["greedy=true", "top_k=1"])
def test_responses_that_are_all_the_same_cause_a_warning(setting):
    (warning,) = recipe_warnings(load_recipe("grpo_math", [f"generation.{setting}"]))
    assert "responses of actor_gen to a prompt are all the same" in warning
    alone = [f"generation.{setting}", "generation.responses_per_prompt=1"]
    assert not list(recipe_warnings(load_recipe("ppo_math", alone)))


def test_log_probs_at_another_temperature_than_that_of_sampling_cause_a_warning():
    settings = ["generation.temperature=0.7", "graph.ref_inf.interface.args.temperature=1.0"]
    (warning,) = recipe_warnings(load_recipe("grpo_math", settings))
    assert "ref_inf computes log-probs at temperature 1.0, of responses sampled at 0.7" in warning
    assert not list(recipe_warnings(load_recipe("grpo_math", settings[:1])))


def test_training_at_another_temperature_than_that_of_sampling_causes_a_warning():
    """ratios would not be 1 as a step begins"""
    setting = "graph.actor_gen.interface.args.generation.temperature=0.7"
    (warning,) = recipe_warnings(load_recipe("grpo_guess", [setting]))
    assert "actor_train computes log-probs at temperature 1.0, of responses sampled at" in warning
    assert not list(recipe_warnings(load_recipe("grpo_guess", ["generation.temperature=0.7"])))


def test_the_warning_of_unequal_temperatures_names_what_makes_them_equal():
    settings = ["ppo.generation.temperature=0.7"]  # not that of `generation`, which ref_inf has
    (warning,) = recipe_warnings(load_recipe("ppo_math", settings))
    equal = "graph.ref_inf.interface.args.temperature=0.7"
    assert f"{equal} makes them equal" in warning
    assert not list(recipe_warnings(load_recipe("ppo_math", [*settings, equal])))


@pytest.mark.parametrize(("steps", "count"), [("20", 0), ("21", 1), ("19-21", 1), ("19-20", 0)])
def test_steps_to_trace_that_a_run_does_not_have_cause_a_warning(steps, count):
    warnings = list(recipe_warnings(load_recipe("ppo_math", [f"log.profile={steps}"])))
    assert len(warnings) == count
    assert all("step 21 is to be traced, and the run has 20" in warning for warning in warnings)


@pytest.mark.parametrize("lr", ["0.3", "3"])
def test_a_learning_rate_as_large_as_the_weights_causes_a_warning(lr):
    (warning,) = recipe_warnings(load_recipe("sft_math", [f"models.actor.backend.args.lr={lr}"]))
    assert f"lr {lr} moves each weight of actor by up to {lr} a step" in warning
    assert "weights are about 0.06 in size" in warning
    assert not list(recipe_warnings(load_recipe("sft_math", ["models.actor.backend.args.lr=0.05"])))


def test_a_reference_that_is_trained_causes_a_warning():
    (warning,) = recipe_warnings(load_recipe("kto_arithmetic", ["graph.ref_inf.model=actor"]))
    assert "ref_inf takes actor, which is trained, as the reference" in warning


def test_a_reference_that_follows_the_policy_causes_no_warning():
    following = ["graph.actor_train.hooks={copy_to: ref, eta: 0.1}"]
    assert not list(recipe_warnings(load_recipe("grpo_math", following)))


def test_a_penalty_whose_gradient_is_0_on_average_causes_a_warning():
    settings = ["grpo.kl_estimator=k1", "grpo.kl_gradient=naive"]
    (warning,) = recipe_warnings(load_recipe("grpo_math", settings))
    assert "the KL penalty of actor_train has no effect" in warning
    assert not list(recipe_warnings(load_recipe("grpo_math", settings[1:])))


def test_an_evaluation_on_the_rows_of_training_causes_a_warning():
    (warning,) = recipe_warnings(load_recipe("rm_arithmetic", ["train.eval.dataset=train"]))
    assert "the evaluation has the rows that are trained on" in warning
    copied = ["datasets.held_out=${datasets.train}"]
    (warning,) = recipe_warnings(load_recipe("rm_arithmetic", copied))
    assert "the evaluation has the rows that are trained on" in warning


def test_episodes_without_room_for_a_second_turn_cause_a_warning():
    (warning,) = recipe_warnings(load_recipe("grpo_calculator", ["generation.max_new_tokens=80"]))
    assert "a turn of actor_gen may take 80 tokens, and an episode 80 in all its 2 turns" in warning
    assert not list(
        recipe_warnings(load_recipe("grpo_calculator", ["generation.max_new_tokens=81"]))
    )


def test_an_evaluation_in_another_environment_than_training_causes_a_warning():
    trained = "graph.actor_gen.interface.args.environment=python"
    (warning,) = recipe_warnings(load_recipe("grpo_calculator", [trained]))
    assert "eval_gen plays in calculator, while actor_gen trains in python; " in warning
    setting = "train.eval.graph.eval_gen.interface.args.environment=python"
    assert f"{setting} makes them equal" in warning
    assert not list(recipe_warnings(load_recipe("grpo_calculator", [trained, setting])))
    meant = [setting.replace("python", "guess"), trained]
    assert not list(recipe_warnings(load_recipe("grpo_calculator", meant)))
    plain = ["train.eval.graph.eval_gen.interface={_replace_: true, type: generation}"]
    assert not list(recipe_warnings(load_recipe("grpo_calculator", plain)))


def test_an_evaluation_without_the_stop_tokens_of_training_causes_a_warning(tmp_path):
    training, no_stops = "generation.stop_token_ids=[5]", "evaluation.generation.stop_token_ids=[]"
    assert not list(recipe_warnings(load_recipe("grpo_math", [training])))
    assert not list(recipe_warnings(load_recipe("grpo_math", [training, no_stops])))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: grpo_math\nevaluation: {generation: {stop_token_ids: []}}\n")
    (warning,) = recipe_warnings(load_recipe(str(recipe), [training]))
    assert "responses of eval_gen do not end at the tokens [5], as those of actor_gen do" in warning
