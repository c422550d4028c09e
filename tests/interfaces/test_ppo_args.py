import dataclasses
import inspect

import pytest

from rlcli.interfaces import _settings
from rlcli.interfaces._ppo import PPOSettings
from rlcli.interfaces._settings import Advantages, CriticLoss, OptimizerSteps, PolicyLoss, RewardShaping, Settings
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.ops.advantages import ADVANTAGE_ESTIMATORS
from rlcli.ops.policy_losses import POLICY_LOSSES

PARTS = [cls for cls in vars(_settings).values() if inspect.isclass(cls) and Settings in cls.__bases__]


def keys(cls):
    return {field.name: field.default for field in dataclasses.fields(cls) if field.init}


def test_actor_and_critic_share_the_settings_of_the_rollout_and_nothing_else():
    shared = keys(PPOSettings)
    assert keys(PPOActorInterface) == shared | keys(PolicyLoss)
    assert keys(PPOCriticInterface) == shared | keys(CriticLoss)


def test_each_key_belongs_to_one_part():
    owners = [name for part in PARTS for name in keys(part)]
    assert len(owners) == len(set(owners))
    assert set(owners) == set(keys(PPOActorInterface)) | set(keys(PPOCriticInterface))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_works_alone(part):
    """with its own checks: an interface of another algorithm takes what it needs"""
    part()


@pytest.mark.parametrize(
    ("functions", "part"), [(ADVANTAGE_ESTIMATORS, Advantages), (POLICY_LOSSES, PolicyLoss)], ids=["advantages", "loss"]
)
def test_what_a_named_function_takes_is_a_key_of_its_part(functions, part):
    for function in functions.values():
        taken = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
        assert taken <= set(keys(part))


def test_the_defaults_are_those_of_the_command_line_of_the_seed_systems():
    args, critic = PPOActorInterface(), PPOCriticInterface()
    assert (args.minibatches, args.ppo_epochs, args.kl_ctl, args.eps_clip) == (4, 1, 0.1, 0.2)
    assert critic.value_eps_clip == 0.2
    assert (args.max_reward_clip, args.early_stop_imp_ratio, args.early_stop_kl) == (20.0, 5.0, None)
    assert (critic.value_norm, critic.value_norm_type) == (True, "exp")
    assert (critic.value_norm_beta, critic.value_norm_eps) == (0.99995, 1e-5)
    assert (args.adv_norm, args.group_adv_norm, args.discount, args.gae_lambda) == (True, False, 1.0, 1.0)
    assert (args.adaptive_kl_ctl, args.adaptive_kl_target, args.adaptive_kl_horizon) == (False, 6, 10000)
    assert (args.c_clip, args.behav_imp_weight_cap, args.token_normalize_scope) == (None, None, "global")
    assert (args.reward_output_scaling, args.reward_output_bias) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (OptimizerSteps, {"minibatches": 0}, "minibatches is 0"),
        (OptimizerSteps, {"ppo_epochs": 0}, "ppo_epochs"),
        (OptimizerSteps, {"token_normalize_scope": "rank"}, "global, dp"),
        (Advantages, {"discount": 1.1}, "discount"),
        (Advantages, {"group_adv_norm": True, "adv_norm": False}, "no effect"),
        (Advantages, {"advantage_estimator": "vtrace"}, "gae, grpo"),
        (Advantages, {"advantage_estimator": "grpo"}, "disable_value: true"),
        (PolicyLoss, {"eps_clip": 0.0}, "eps_clip"),
        (PolicyLoss, {"eps_clip": float("nan")}, "eps_clip"),
        (PolicyLoss, {"c_clip": 1.0}, "c_clip is 1.0"),
        (PolicyLoss, {"c_clip": 3.0, "policy_loss": "gspo"}, "no effect with policy_loss: gspo"),
        (PolicyLoss, {"policy_loss": "reinforce"}, "ppo, gspo"),
        (PolicyLoss, {"loss_aggregation": "batch"}, "token, sequence"),
        (RewardShaping, {"kl_ctl": -0.1}, "kl_ctl"),
        (RewardShaping, {"adaptive_kl_ctl": True, "kl_ctl": 0.0}, "would stay 0"),
        (RewardShaping, {"kl_estimator": "k4"}, "k1, k2, k3"),
        (CriticLoss, {"value_norm_type": "mean"}, "exp, ma"),
        (CriticLoss, {"value_loss": "mae"}, "mse, huber"),
        (PPOSettings, {"behav_imp_weight_cap": 2.0}, "use_decoupled_loss"),
        (PPOSettings, {"generation_size": 1}, "best of k"),
        (PPOSettings, {"group_adv_norm": True}, "responses_per_prompt"),
        (PPOSettings, {"advantage_estimator": "grpo", "disable_value": True}, "responses_per_prompt"),
        (PPOSettings, {"generation": {"temperature": 0}}, "temperature"),
        (PPOActorInterface, {"policy_loss": "reinforce"}, "ppo, gspo"),
        (PPOCriticInterface, {"value_norm_beta": 1.0}, "value_norm_beta"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else getattr(value, "__name__", None),
)
def test_settings_that_make_no_sense(cls, settings, message):
    with pytest.raises(ValueError, match=message):
        cls(**settings)
