import dataclasses
import inspect
import itertools

import pytest

from rlcli.interfaces import _rollout_settings, _settings
from rlcli.interfaces._checked import Settings
from rlcli.interfaces._policy_loss import PolicySettings
from rlcli.interfaces._ppo import PPOSettings
from rlcli.interfaces._rollout_settings import (
    GeneralizedAdvantages,
    KLPenalty,
    KLPlacement,
    RelativeAdvantages,
    RewardShaping,
)
from rlcli.interfaces._settings import CriticLoss, OldPolicy, OptimizerSteps, PolicyLoss
from rlcli.interfaces.grpo import GRPOInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.ops.policy_losses import LOSS_AGGREGATIONS, POLICY_LOSSES

SETTINGS_CLASSES = list(
    dict.fromkeys(
        cls
        for cls in itertools.chain(vars(_settings).values(), vars(_rollout_settings).values())
        if inspect.isclass(cls) and issubclass(cls, Settings)
    )
)


def keys(cls):
    return {field.name: field.default for field in dataclasses.fields(cls) if field.init}


def test_actor_and_critic_share_only_the_settings_of_the_rollout():
    shared = keys(PPOSettings)
    assert keys(PPOActorInterface) == shared | keys(PolicySettings)
    assert keys(PPOCriticInterface) == shared | keys(CriticLoss)


def test_each_key_belongs_to_one_settings_class():
    owners = [name for cls in SETTINGS_CLASSES for name in set(cls.__annotations__) & set(keys(cls))]
    assert len(owners) == len(set(owners))
    interfaces = (PPOActorInterface, PPOCriticInterface, GRPOInterface)
    assert set(owners) == {name for interface in interfaces for name in keys(interface)}


@pytest.mark.parametrize("settings_class", SETTINGS_CLASSES)
def test_each_settings_class_works_alone(settings_class):
    """with its own checks: an interface of another algorithm takes what it needs"""
    settings_class()


@pytest.mark.parametrize("functions", [POLICY_LOSSES, LOSS_AGGREGATIONS], ids=["loss", "aggregation"])
def test_parameters_of_named_functions_are_settings(functions):
    for function in functions.values():
        taken = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
        assert taken <= set(keys(PolicyLoss))


def test_the_defaults_of_grpo_are_those_of_its_paper():
    args = GRPOInterface()
    assert (args.baseline, args.scale, args.credit, args.adv_norm) == ("group", "group", "response", False)
    assert (args.kl_ctl, args.kl_in, args.kl_estimator) == (0.04, "loss", "k3")
    assert (args.policy_loss, args.loss_aggregation, args.eps_clip) == ("ppo", "sequence", 0.2)


def test_the_defaults_of_ppo_are_those_of_the_seed_systems():
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
        (GeneralizedAdvantages, {"discount": 1.1}, "discount"),
        (GeneralizedAdvantages, {"group_adv_norm": True, "adv_norm": False}, "no effect"),
        (RelativeAdvantages, {"baseline": "mean"}, "group, leave_one_out, batch, none"),
        (RelativeAdvantages, {"scale": "std"}, "group, batch, none"),
        (RelativeAdvantages, {"credit": "token"}, "response, to_go"),
        (KLPlacement, {"kl_in": "advantage"}, "loss, reward"),
        (KLPlacement, {"kl_gradient": "k2"}, "reverse, naive"),
        (KLPlacement, {"kl_gradient": "naive", "kl_in": "reward"}, "no effect"),
        (OldPolicy, {"use_decoupled_loss": True, "behav_imp_weight_mode": "truncate"}, "needs behav_imp_weight_cap"),
        (OldPolicy, {"behav_imp_weight_mode": "clip"}, "mask, truncate"),
        (PolicyLoss, {"eps_clip": 0.0}, "eps_clip"),
        (PolicyLoss, {"eps_clip": float("nan")}, "eps_clip"),
        (PolicyLoss, {"c_clip": 1.0}, "c_clip is 1.0"),
        (PolicyLoss, {"c_clip": 3.0, "policy_loss": "gspo"}, "no effect with policy_loss: gspo"),
        (PolicyLoss, {"policy_loss": "reinforce"}, "ppo, gspo, cispo, sequence"),
        (PolicyLoss, {"loss_aggregation": "batch"}, "token, sequence, constant"),
        (PolicyLoss, {"loss_aggregation": "constant"}, "set both, or neither"),
        (PolicyLoss, {"loss_constant": 9.0}, "set both, or neither"),
        (PolicyLoss, {"eps_clip_high": 0.0}, "eps_clip_high"),
        (RewardShaping, {"overlong_buffer": 0}, "overlong_buffer"),
        (GRPOInterface, {"overlong_buffer": 300}, "at most generation.max_new_tokens, 256"),
        (KLPenalty, {"kl_ctl": -0.1}, "kl_ctl"),
        (KLPenalty, {"adaptive_kl_ctl": True, "kl_ctl": 0.0}, "would stay 0"),
        (KLPenalty, {"kl_estimator": "k4"}, "k1, k2, k3"),
        (CriticLoss, {"value_norm_type": "mean"}, "exp, ma"),
        (CriticLoss, {"value_loss": "mae"}, "mse, huber"),
        (PPOSettings, {"behav_imp_weight_cap": 2.0}, "use_decoupled_loss"),
        (PPOSettings, {"generation_size": 1}, "best of k"),
        (PPOSettings, {"group_adv_norm": True}, "responses_per_prompt"),
        (PPOSettings, {"generation": {"temperature": 0}}, "temperature"),
        (PPOActorInterface, {"policy_loss": "reinforce"}, "ppo, gspo"),
        (PPOCriticInterface, {"value_norm_beta": 1.0}, "value_norm_beta"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else getattr(value, "__name__", None),
)
def test_invalid_settings_are_refused(cls, settings, message):
    with pytest.raises(ValueError, match=message):
        cls(**settings)


def test_settings_that_shape_advantages_must_be_equal_for_actor_and_critic():
    """Every setting between a rollout and its advantages is named, and nothing that only one of them uses."""
    shared = (GeneralizedAdvantages, KLPenalty, RewardShaping, OldPolicy)
    decisive = {field.name for cls in shared for field in dataclasses.fields(cls) if field.init}
    alike = {entry.split()[0] for entry in PPOSettings.ALIKE["train_step"]}
    assert alike == {*decisive, "generation", "generation_size"}
