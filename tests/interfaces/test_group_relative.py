"""GRPO and its family are what their papers write; `InterfaceContract` has what holds for any
interface."""

import pytest
import torch

from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.testing.batches import make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import TinyRanks, tiny_model

from .training import learn, rate, with_settings

OF_RECIPE = {"minibatches": 1, "early_stop_imp_ratio": None, "loss_aggregation": "sequence"}
REINFORCE_PLUS_PLUS = {
    "baseline": "none",
    "scale": "none",
    "credit": "to_go",
    "adv_norm": True,
    "kl_in": "reward",
    "kl_estimator": "k1",
    "loss_aggregation": "token",
}
DAPO = {"kl_ctl": 0.0, "eps_clip_high": 0.28, "loss_aggregation": "token"}
RLOO = {
    "baseline": "leave_one_out",
    "scale": "none",
    "policy_loss": "sequence",
    "kl_in": "reward",
    "kl_estimator": "k1",
    "loss_aggregation": "constant",
    "loss_constant": 1.0,
}


class TestContract(InterfaceContract):
    name = "group_relative"
    args = {"adaptive_kl_ctl": True, "adaptive_kl_horizon": 100.0}


class TestContractOfReinforcePlusPlus(InterfaceContract):
    """Statistics of the whole batch, over ranks, and a penalty in the reward."""

    name = "group_relative"
    args = {
        "baseline": "batch",
        "scale": "batch",
        "credit": "to_go",
        "adv_norm": True,
        "kl_in": "reward",
        "kl_estimator": "k1",
    }


def grpo(**settings):
    """(the interface for advantages, that of the policy)."""
    return with_settings({**OF_RECIPE, **settings}, GroupRelativeInterface, PPOActorInterface)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kl_estimator": "k1"},
        {"kl_estimator": "k2", "kl_ctl": 0.7},
        {"kl_gradient": "naive", "kl_ctl": 0.7},
        {"kl_in": "reward", "kl_ctl": 0.7},
        {"kl_ctl": 0.0},
        {"scale": "none", "loss_aggregation": "constant", "loss_constant": 9.0},
        RLOO,
        {**RLOO, "eps_clip": 0.05},
        REINFORCE_PLUS_PLUS,
        {"scale": "none", "adv_norm": True, "kl_estimator": "k2"},
        {"scale": "batch", "policy_loss": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.1},
        {"baseline": "batch", "scale": "batch", "credit": "to_go", "kl_in": "reward"},
        {**DAPO, "eps_clip": 0.05},
        {"overlong_limit": 6, "overlong_buffer": 4, "overlong_penalty": 0.5},
        {"mask_too_long": True},
        {"policy_loss": "gspo", "eps_clip": 0.02, "eps_clip_high": 0.03},
        {"policy_loss": "sequence"},
        {
            "use_decoupled_loss": True,
            "behav_imp_weight_cap": 1.1,
            "behav_imp_weight_mode": "truncate",
        },
        {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.1, "loss_aggregation": "token"},
        {
            "use_decoupled_loss": True,
            "behav_imp_weight_cap": 1.1,
            "behav_imp_weight_floor": 0.95,
            "behav_imp_weight_mode": "truncate",
            "behav_imp_weight_level": "geometric",
        },
        {
            "use_decoupled_loss": True,
            "behav_imp_weight_cap": 1.2,
            "behav_imp_weight_floor": 0.8,
            "behav_imp_weight_level": "sequence",
        },
        {"use_decoupled_loss": True, "behav_imp_weight_floor": 0.95},
        {"scale": "mean"},
        {"policy_loss": "sapo", "tau_pos": 0.5},
        {"policy_loss": "sapo", "tau_neg": 3.0, "loss_aggregation": "token"},
        {"policy_loss": "dppo_tv", "eps_clip": 1e-3, "eps_clip_high": 5e-4},
        {"policy_loss": "dppo_kl", "eps_clip": 1e-5},
        {"c_clip": 1.2, "eps_clip": 0.1, "entropy_coef": 0.3},
        {"use_dense_reward": True, "credit": "to_go", "generation": {"temperature": 0.7}},
    ],
    ids=lambda settings: ",".join(settings) or "defaults",
)
def test_gradient_is_that_of_the_formula(step_by_hand, settings):
    """Gradient and loss are those of the paper written out by hand."""
    advantages, policy = grpo(**settings)
    stats, _ = step_by_hand(advantages, policy)
    assert stats["kl_coef"] == pytest.approx(advantages.kl_ctl)
    assert ("kl_penalty" in stats) == (advantages.kl_in == "loss" and advantages.kl_ctl > 0)


def test_rewards_are_scaled_after_their_bias_is_subtracted(rollout):
    """Rewards of 0 and 1 become (0 - 0.5) * 2 = -1 and (1 - 0.5) * 2 = 1."""
    settings = {"reward_output_bias": 0.5, "reward_output_scaling": 2.0, "kl_ctl": 0.0}
    advantages = GroupRelativeInterface(baseline="none", scale="none", **settings)
    output, _ = rate(advantages, tiny_model(), rollout)
    counts = output.data["loss_mask"].split(output.flat_seqlens("advantages"))
    expected = [2 * reward - 1 for reward in rollout.data["rewards"].tolist()]
    for reward, mask, rows in zip(
        expected,
        counts,
        output.data["advantages"].split(output.flat_seqlens("advantages")),
        strict=True,
    ):
        assert rows[mask].tolist() == [reward] * int(mask.sum())


def test_responses_with_equal_rewards_teach_nothing(rollout, sampled_by):
    """All responses to a prompt are right, or all wrong: there is nothing to compare."""
    model = tiny_model()
    data = sampled_by(model, rollout)
    # equal within each pair, and not between them
    data.data["rewards"] = (torch.arange(16) % 4 < 2).float()
    for settings in ({}, {"baseline": "leave_one_out", "scale": "none"}, {"scale": "batch"}):
        advantages, policy = grpo(kl_ctl=0.0, **settings)
        stats = learn(policy, advantages, model, data)
        assert stats["grad_norm"] == 0
        assert (stats["advantage_abs"], stats["equal_rewards_fraction"]) == (0, 1)
    data.data["rewards"][2:4] = torch.tensor([0.0, 1.0])
    assert rate(GroupRelativeInterface(), model, data)[1]["equal_rewards_fraction"] == 7 / 8
    data.data["rewards"][2:4] = 0.0
    advantages, policy = grpo(kl_ctl=0.0, baseline="batch", scale="batch")
    assert learn(policy, advantages, model, data)["grad_norm"] > 0


def test_equal_rewards_are_counted_among_the_best_responses_only(rollout):
    """Of three responses to each prompt, the two best are equal."""
    rollout = make_batch(sorted(rollout.keys), [[(2, 3), (2, 1), (2, 5)], [(1, 2), (1, 6), (1, 4)]])
    rollout.data["rewards"] = torch.tensor([0.0, 1.0, 1.0, 2.0, 1.0, 0.0])
    for train_on_best, share in ((None, 0.0), (2, 0.5)):
        _, numbers = rate(
            GroupRelativeInterface(train_on_best=train_on_best), tiny_model(), rollout
        )
        assert numbers["equal_rewards_fraction"] == share


def test_dense_rewards_are_those_of_their_responses(rollout, caplog):
    """Of two responses to each prompt, the second one has earned something, before its end."""
    settings = {"use_dense_reward": True, "reward_delta": False, "kl_ctl": 0.0}
    dense = rollout.data["dense_rewards"].zero_()
    rate(GroupRelativeInterface(**settings), tiny_model(), rollout)
    assert len(caplog.records) == 1
    ends = torch.tensor(rollout.flat_seqlens("packed_input_ids")).cumsum(0)
    dense[ends[1::2] - 1] = 0.5
    _, numbers = rate(GroupRelativeInterface(**settings), tiny_model(), rollout)
    assert (numbers["shaped_reward"], numbers["equal_rewards_fraction"]) == (0.25, 0)
    assert len(caplog.records) == 1


def test_warning_in_steps_where_the_rewards_of_each_group_are_equal(rollout, caplog):
    """In the first of such steps, and again in the eleventh."""
    interface, model = GroupRelativeInterface(kl_ctl=0.0), tiny_model()
    rollout.data["rewards"] = torch.zeros(16)
    for _ in range(11):
        rate(interface, model, rollout)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition("(")[2].partition(" in")[0] for message in messages] == ["1", "11"]
    rollout.data["rewards"][0] = 1.0
    rate(interface, model, rollout)
    assert interface.steps_without_signal == 0
    assert len(caplog.records) == 2


def test_warning_comes_from_the_rank_of_the_first_sample_once_all_ranks_see_equal_rewards(
    rollout, caplog
):
    """A rank whose own groups are equal does not warn as long as another's differ."""
    rollout.data["rewards"] = torch.zeros(16)
    rollout.data["rewards"][-1] = 1.0
    halves = (range(4), range(4, 8))
    spread(rollout, halves)
    assert not caplog.records
    rollout.data["rewards"][-1] = 0.0
    spread(rollout, halves)
    assert len(caplog.records) == 1


def spread(rollout, shares):
    """Advantages of a batch that is spread over as many ranks."""
    ranks = TinyRanks(len(shares))
    ranks.run(
        lambda rank: rate(
            GroupRelativeInterface(),
            tiny_model(ranks=ranks, rank=rank),
            rollout.select_indices(shares[rank]),
        )
    )


def test_without_a_penalty_no_reference_is_read(rollout):
    few = rollout.select(
        set(rollout.keys) - {"values", "packed_ref_logprobs", "proximal_logprobs", "dense_rewards"}
    )
    advantages, policy = grpo(kl_ctl=0.0)
    assert "kl" not in learn(policy, advantages, tiny_model(), few)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_adaptive_weight_of_the_penalty_changes_the_next_step(rollout, kl_in):
    rollout.data["packed_ref_logprobs"] = rollout.data["packed_logprobs"] - 5.0
    adaptive = {
        "adaptive_kl_ctl": True,
        "adaptive_kl_target": 1.0,
        "adaptive_kl_horizon": 80,
        "kl_estimator": "k1",
    }
    advantages, policy = grpo(kl_in=kl_in, kl_ctl=0.1, **adaptive)
    first, second = (learn(policy, advantages, tiny_model(), rollout) for _ in range(2))
    assert first["kl_coef"] == pytest.approx(0.1)
    assert second["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 16 / 80))
    assert second["loss"] != first["loss"]
