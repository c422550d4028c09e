import dataclasses
import inspect

import pytest

from rlcli.interfaces._optimizer_steps import OptimizerSteps
from rlcli.interfaces.advantages.gae import GAEInterface
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.ops.advantages import BASELINES, SCALES
from rlcli.ops.policy_losses import LOSS_AGGREGATIONS, POLICY_LOSSES

INTERFACES = (PPOActorInterface, PPOCriticInterface, GAEInterface, GroupRelativeInterface)


def keys(cls):
    return {field.name for field in dataclasses.fields(cls) if field.init}


def test_each_key_belongs_to_one_call():
    """So calls cannot disagree on what they learn from. The steps of policy and critic are their
    own, and an estimator is for the penalty in the reward and for that in the loss."""
    actor, critic = keys(PPOActorInterface), keys(PPOCriticInterface)
    assert actor & critic == keys(OptimizerSteps)
    for advantages in (GAEInterface, GroupRelativeInterface):
        assert keys(advantages) & critic == set()
        assert keys(advantages) & actor == {"kl_estimator"}


def test_classes_behind_an_interface_are_few():
    for interface in INTERFACES:
        assert len(inspect.getmro(interface)) <= 4, interface


@pytest.mark.parametrize(
    "functions", [POLICY_LOSSES, LOSS_AGGREGATIONS], ids=["loss", "aggregation"]
)
def test_keyword_of_a_named_function_is_a_key_of_the_policy(functions):
    for function in functions.values():
        keywords = {
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        }
        assert keywords <= keys(PPOActorInterface)


def test_defaults_of_group_relative_are_those_of_the_grpo_paper():
    advantages, policy = GroupRelativeInterface(), PPOActorInterface()
    assert (advantages.baseline, advantages.scale) == ("group", "group")
    assert (advantages.credit, advantages.adv_norm) == ("response", False)
    assert (advantages.kl_ctl, advantages.kl_in, advantages.kl_estimator) == (0.04, "loss", "k3")
    assert (policy.policy_loss, policy.eps_clip, policy.kl_estimator) == ("ppo", 0.2, "k3")


def test_defaults_are_those_of_the_command_line_of_the_seed_systems():
    policy, critic, advantages = PPOActorInterface(), PPOCriticInterface(), GAEInterface()
    assert (policy.minibatches, policy.ppo_epochs, policy.eps_clip) == (4, 1, 0.2)
    assert (policy.early_stop_imp_ratio, policy.early_stop_kl) == (5.0, None)
    assert (policy.c_clip, policy.token_normalize_scope, policy.loss_aggregation) == (
        None,
        "global",
        "token",
    )
    assert (critic.minibatches, critic.ppo_epochs, critic.value_eps_clip) == (4, 1, 0.2)
    assert (critic.value_norm, critic.value_norm_type) == (True, "exp")
    assert (critic.value_norm_beta, critic.value_norm_eps) == (0.99995, 1e-5)
    assert (advantages.kl_ctl, advantages.kl_in, advantages.kl_estimator) == (0.1, "reward", "k1")
    assert (advantages.max_reward_clip, advantages.behav_imp_weight_cap) == (20.0, None)
    assert (advantages.adv_norm, advantages.group_adv_norm) == (True, False)
    assert (advantages.discount, advantages.gae_lambda) == (1.0, 1.0)
    assert advantages.adaptive_kl_ctl is False
    assert (advantages.adaptive_kl_target, advantages.adaptive_kl_horizon) == (6, 10000)
    assert (advantages.reward_output_scaling, advantages.reward_output_bias) == (1.0, 0.0)


OF_BOTH_ESTIMATORS = [
    (
        {"use_decoupled_loss": True, "behav_imp_weight_mode": "truncate"},
        "needs behav_imp_weight_cap",
    ),
    ({"behav_imp_weight_cap": 2.0}, "needs use_decoupled_loss; use_decoupled_loss is False"),
    ({"use_decoupled_loss": True, "behav_imp_weight_cap": 1.0}, "behav_imp_weight_cap is 1.0"),
    ({"behav_imp_weight_mode": "clip"}, "mask, truncate"),
    ({"behav_imp_weight_floor": 0.5}, "needs use_decoupled_loss; use_decoupled_loss is False"),
    ({"use_decoupled_loss": True, "behav_imp_weight_floor": 1.0}, "behav_imp_weight_floor is 1.0"),
    ({"behav_imp_weight_level": "geometric"}, "needs use_decoupled_loss"),
    ({"behav_imp_weight_level": "group"}, "token, sequence, geometric"),
    ({"overlong_buffer": 0}, "overlong_buffer"),
    ({"overlong_buffer": 300, "overlong_limit": 256}, "at most 256, overlong_limit"),
    ({"overlong_buffer": 30}, "overlong_buffer needs overlong_limit"),
    ({"use_dense_reward": True, "mask_no_eos_with_zero": True}, "needs use_dense_reward=False"),
    ({"use_dense_reward": True, "reward_output_bias": 0.5}, "needs use_dense_reward=False"),
    ({"overlong_penalty": 0.0}, "overlong_penalty"),
    ({"max_reward_clip": 0.0}, "max_reward_clip"),
    ({"train_on_best": 0}, "train_on_best"),
    ({"kl_ctl": -0.1}, "kl_ctl"),
    ({"kl_in": "advantage"}, "loss, reward"),
    ({"kl_estimator": "k4"}, "k1, k2, k3"),
    ({"adaptive_kl_ctl": True, "kl_ctl": 0.0}, "adaptive_kl_ctl needs kl_ctl; kl_ctl is 0"),
    ({"adaptive_kl_target": 0.0}, "adaptive_kl_target"),
    ({"adaptive_kl_horizon": 0.0}, "adaptive_kl_horizon"),
]


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        *((GAEInterface, *row) for row in OF_BOTH_ESTIMATORS),
        *((GroupRelativeInterface, *row) for row in OF_BOTH_ESTIMATORS),
        (GAEInterface, {"discount": 1.1}, "discount"),
        (GAEInterface, {"gae_lambda": -0.1}, "gae_lambda"),
        (GAEInterface, {"group_adv_norm": True, "adv_norm": False}, "needs adv_norm"),
        (GroupRelativeInterface, {"baseline": "mean"}, ", ".join(BASELINES)),
        (GroupRelativeInterface, {"scale": "std"}, ", ".join(SCALES)),
        (GroupRelativeInterface, {"credit": "token"}, "response, to_go"),
        (GroupRelativeInterface, {"train_on_best": 1}, "set train_on_best above 1"),
        (
            GroupRelativeInterface,
            {"train_on_best": 1, "baseline": "none"},
            "set train_on_best above 1",
        ),
        (
            GroupRelativeInterface,
            {"train_on_best": 1, "baseline": "none", "scale": "mean"},
            "set train_on_best above 1",
        ),
        (
            GroupRelativeInterface,
            {"train_on_best": 1, "scale": "none"},
            "set train_on_best above 1",
        ),
        (PPOActorInterface, {"minibatches": 0}, "minibatches is 0"),
        (PPOActorInterface, {"ppo_epochs": 0}, "ppo_epochs"),
        (PPOActorInterface, {"token_normalize_scope": "rank"}, "global, dp"),
        (PPOActorInterface, {"eps_clip": 0.0}, "eps_clip"),
        (PPOActorInterface, {"eps_clip": float("nan")}, "eps_clip"),
        (PPOActorInterface, {"eps_clip_high": 0.0}, "eps_clip_high"),
        (PPOActorInterface, {"c_clip": 1.0}, "c_clip is 1.0"),
        (
            PPOActorInterface,
            {"c_clip": 3.0, "policy_loss": "gspo"},
            "c_clip needs policy_loss=ppo; policy_loss is gspo",
        ),
        (
            PPOActorInterface,
            {"eps_clip_high": 0.3, "policy_loss": "sapo"},
            "eps_clip_high needs policy_loss=ppo",
        ),
        (PPOActorInterface, {"tau_neg": 1.2}, "tau_neg needs policy_loss=sapo; policy_loss is ppo"),
        (PPOActorInterface, {"policy_loss": "reinforce"}, "ppo, gspo, cispo, sequence, sapo"),
        (PPOActorInterface, {"loss_aggregation": "batch"}, "token, sequence, constant"),
        (PPOActorInterface, {"loss_aggregation": "constant"}, "constant needs loss_constant"),
        (PPOActorInterface, {"loss_constant": 9.0}, "needs loss_aggregation=constant"),
        (PPOActorInterface, {"entropy_coef": -0.1}, "entropy_coef"),
        (PPOActorInterface, {"kl_estimator": "k4"}, "k1, k2, k3"),
        (PPOActorInterface, {"kl_gradient": "k2"}, "reverse, naive"),
        (PPOActorInterface, {"generation": {"temperature": 0}}, "temperature"),
        (PPOCriticInterface, {"minibatches": 0}, "minibatches is 0"),
        (PPOCriticInterface, {"value_norm_type": "mean"}, "exp, ma"),
        (PPOCriticInterface, {"value_loss": "mae"}, "mse, huber"),
        (PPOCriticInterface, {"value_norm_beta": 1.0}, "value_norm_beta"),
        (PPOCriticInterface, {"value_eps_clip": 0.0}, "value_eps_clip"),
    ],
    ids=lambda value: (
        ",".join(value) if isinstance(value, dict) else getattr(value, "__name__", None)
    ),
)
def test_settings_that_make_no_sense_are_refused(cls, settings, message):
    with pytest.raises(ValueError, match=message):
        cls(**settings)


def test_single_response_to_a_prompt_is_enough_where_none_are_compared():
    GroupRelativeInterface(train_on_best=1, baseline="batch", scale="batch")
    GroupRelativeInterface(train_on_best=1, baseline="none", scale="none")
    GAEInterface(train_on_best=1)
