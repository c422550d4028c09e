import dataclasses

import pytest

from rlcli.interfaces._ppo import PPOArgs
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface


def test_actor_and_critic_take_exactly_the_shared_settings():
    shared = {f.name: f.default for f in dataclasses.fields(PPOArgs)}
    for interface in (PPOActorInterface, PPOCriticInterface):
        assert {f.name: f.default for f in dataclasses.fields(interface) if f.init} == shared


def test_the_defaults_are_those_of_the_command_line_of_the_seed_systems():
    args = PPOArgs()
    assert (args.minibatches, args.ppo_epochs, args.kl_ctl, args.eps_clip, args.value_eps_clip) == (
        4,
        1,
        0.1,
        0.2,
        0.2,
    )
    assert (args.max_reward_clip, args.early_stop_imp_ratio, args.early_stop_kl) == (20.0, 5.0, None)
    assert (args.value_norm, args.value_norm_type, args.value_norm_beta, args.value_norm_eps) == (
        True,
        "exp",
        0.99995,
        1e-5,
    )
    assert (args.adv_norm, args.group_adv_norm, args.discount, args.gae_lambda) == (True, False, 1.0, 1.0)
    assert (args.adaptive_kl_ctl, args.adaptive_kl_target, args.adaptive_kl_horizon) == (False, 6, 10000)
    assert (args.c_clip, args.behav_imp_weight_cap, args.token_normalize_scope) == (None, None, "global")
    assert (args.reward_output_scaling, args.reward_output_bias) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minibatches": 0}, "minibatches is 0"),
        ({"ppo_epochs": 0}, "ppo_epochs"),
        ({"discount": 1.1}, "discount"),
        ({"eps_clip": 0.0}, "eps_clip"),
        ({"eps_clip": float("nan")}, "eps_clip"),
        ({"c_clip": 1.0}, "c_clip is 1.0"),
        ({"kl_ctl": -0.1}, "kl_ctl"),
        ({"behav_imp_weight_cap": 2.0}, "use_decoupled_loss"),
        ({"adaptive_kl_ctl": True, "kl_ctl": 0.0}, "would stay 0"),
        ({"generation_size": 1}, "best of k"),
        ({"group_adv_norm": True}, "responses_per_prompt"),
        ({"group_adv_norm": True, "adv_norm": False}, "no effect"),
        ({"value_norm_type": "mean"}, "exp, ma"),
        ({"token_normalize_scope": "rank"}, "global, dp"),
        ({"generation": {"temperature": 0}}, "temperature"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOArgs(**settings)
