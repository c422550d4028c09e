"""GRPO and its family equal the formulas of their papers; `InterfaceContract` checks what holds for any interface."""

import pytest
import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.model import MicroBatchSpec, call_interface
from rlcli.interfaces.grpo import GRPOInterface
from rlcli.testing.batches import make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import TinyLM, tiny_model

SPEC = MicroBatchSpec()
LIMITLESS = {"early_stop_imp_ratio": None}
REINFORCE_PLUS_PLUS = {
    "baseline": "none", "scale": "none", "credit": "to_go", "adv_norm": True, "kl_in": "reward", "kl_estimator": "k1",
    "loss_aggregation": "token",
}  # fmt: skip
DAPO = {"kl_ctl": 0.0, "eps_clip_high": 0.28, "loss_aggregation": "token", "generation": {"responses_per_prompt": 2}}
RLOO = {
    "baseline": "leave_one_out", "scale": "none", "policy_loss": "sequence", "kl_in": "reward", "kl_estimator": "k1",
    "loss_aggregation": "constant", "loss_constant": 1.0,
}  # fmt: skip


class TestContract(InterfaceContract):
    name = "grpo"
    args = {"minibatches": 2, "ppo_epochs": 2, "adaptive_kl_ctl": True, "adaptive_kl_horizon": 100.0}


class TestContractOfReinforcePlusPlus(InterfaceContract):
    """Statistics of the whole batch, over ranks, and a penalty in the reward."""

    name = "grpo"
    args = {"minibatches": 2, **REINFORCE_PLUS_PLUS, "scale": "batch", "baseline": "batch"}


class TestContractOfConstantAggregation(InterfaceContract):
    """A weight that does not count tokens, and ratios of whole responses."""

    name = "grpo"
    args = {
        "minibatches": 2, **RLOO, "loss_constant": 7.0, "entropy_coef": 0.1,
    }  # fmt: skip


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
        {"generation": {"responses_per_prompt": 2, "max_new_tokens": 6}, "overlong_buffer": 4, "overlong_penalty": 0.5},
        {"mask_too_long": True},
        {"policy_loss": "gspo", "eps_clip": 0.02, "eps_clip_high": 0.03},
        {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.1, "behav_imp_weight_mode": "truncate"},
        {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.1, "loss_aggregation": "token"},
        {"c_clip": 1.2, "eps_clip": 0.1, "entropy_coef": 0.3},
        {"use_dense_reward": True, "credit": "to_go", "generation": {"responses_per_prompt": 2, "temperature": 0.7}},
    ],
    ids=lambda settings: ",".join(settings) or "defaults",
)
def test_gradient_is_that_of_the_formula(rollout, sampled_by, by_hand, loss_by_hand, settings):
    """gradient and loss are those of the paper written out by hand"""
    model = tiny_model()
    data = sampled_by(model, rollout, spread=0.3)
    args = GRPOInterface(minibatches=1, **LIMITLESS, **settings)
    sequences = by_hand(args, data, args.kl_ctl if args.kl_in == "reward" else 0.0)
    stats = args.train_step(model, data, SPEC)
    twin = TinyLM()
    loss, count = loss_by_hand(args, sequences, twin)
    (loss / count).backward()
    assert stats["loss_weight"] == count
    assert stats["loss"] == pytest.approx(float(loss.detach()) / count, rel=1e-5, abs=1e-6)
    for name in ("embedding", "head"):
        torch.testing.assert_close(model.module.gradient[name], getattr(twin, name).grad, atol=1e-6, rtol=1e-4)
    assert stats["kl_coef"] == args.kl_ctl
    assert ("kl_penalty" in stats) == (args.kl_in == "loss" and args.kl_ctl > 0)


def test_groups_with_equal_rewards_give_no_gradient(rollout, sampled_by):
    """every response to a prompt right, or every one wrong: there is nothing to compare"""
    model = tiny_model()
    data = sampled_by(model, rollout)
    data.data["rewards"] = (torch.arange(16) % 4 < 2).float()  # alike within each pair, and not between them
    for settings in ({}, {"baseline": "leave_one_out", "scale": "none"}, {"scale": "batch"}):
        stats = GRPOInterface(kl_ctl=0.0, minibatches=1, **settings).train_step(model, data, SPEC)
        assert stats["grad_norm"] == 0
        assert (stats["advantage_abs"], stats["equal_rewards_fraction"]) == (0, 1)
    data.data["rewards"][2:4] = torch.tensor([0.0, 1.0])
    assert GRPOInterface(kl_ctl=0.0).train_step(model, data, SPEC)["equal_rewards_fraction"] == 7 / 8
    data.data["rewards"][2:4] = 0.0
    stats = GRPOInterface(kl_ctl=0.0, minibatches=1, baseline="batch", scale="batch").train_step(model, data, SPEC)
    assert stats["grad_norm"] > 0


def test_steps_in_which_all_groups_have_equal_rewards_are_reported(rollout, caplog):
    """in the first of such steps, and again in the eleventh"""
    interface, model = GRPOInterface(kl_ctl=0.0, minibatches=1), tiny_model()
    rollout.data["rewards"] = torch.zeros(16)
    for _ in range(11):
        interface.train_step(model, rollout, SPEC)
    messages = [record.getMessage() for record in caplog.records]
    assert [line.partition("(")[2].partition(" in")[0] for line in messages] == ["1", "11"]
    rollout.data["rewards"][0] = 1.0
    interface.train_step(model, rollout, SPEC)
    assert interface.steps_without_signal == 0
    assert len(caplog.records) == 2


def test_the_reference_is_not_read_without_a_kl_penalty(rollout):
    few = rollout.select(set(rollout.keys) - {"values", "packed_ref_logprobs", "proximal_logprobs", "dense_rewards"})
    assert "kl" not in GRPOInterface(kl_ctl=0.0).train_step(tiny_model(), few, SPEC)


def test_a_kl_penalty_in_the_loss_does_not_change_the_advantages(rollout, sampled_by):
    data = sampled_by(tiny_model(), rollout)
    data.data["packed_ref_logprobs"] = data.data["packed_logprobs"] - 1.0
    in_loss, in_reward = (GRPOInterface(kl_in=target, kl_ctl=0.5, **LIMITLESS) for target in ("loss", "reward"))
    free = GRPOInterface(kl_ctl=0.0, **LIMITLESS).train_step(tiny_model(), data, SPEC)
    assert in_loss.train_step(tiny_model(), data, SPEC)["advantage_abs"] == free["advantage_abs"]
    assert in_reward.train_step(tiny_model(), data, SPEC)["advantage_abs"] != free["advantage_abs"]


def test_the_kl_coefficient_follows_the_controller(rollout):
    """in the loss as in the reward, an adaptive one follows the KL per response"""
    rollout.data["packed_ref_logprobs"] = rollout.data["packed_logprobs"] - 5.0
    for target in ("loss", "reward"):
        settings = {"adaptive_kl_ctl": True, "adaptive_kl_target": 1.0, "adaptive_kl_horizon": 80, "kl_estimator": "k1"}
        interface = GRPOInterface(kl_in=target, kl_ctl=0.1, **settings, **LIMITLESS)
        first = call_interface(interface, "train_step", tiny_model(), rollout)
        assert interface.controller.coef == pytest.approx(0.1 * (1 + 0.2 * 16 / 80))
        second = call_interface(interface, "train_step", tiny_model(), rollout)
        assert second["kl_coef"] == interface.controller.coef / (1 + 0.2 * 16 / 80)
        assert second["loss"] != first["loss"]


def test_a_group_of_responses_is_sampled_for_each_prompt(tokenizer):
    prompts = make_batch(["packed_prompts"], [[(3, 1)], [(1, 1)]])
    sampling = GenerationHyperparameters(max_new_tokens=4, responses_per_prompt=3)
    out = GRPOInterface(generation=sampling).generate(tiny_model(tokenizer), prompts, SPEC)
    assert [len(lengths) for lengths in out.seqlens["packed_input_ids"]] == [3, 3]
    assert out.data["seq_no_eos_mask"].dtype is torch.bool
    best = GRPOInterface(generation=sampling, generation_size=5).generate(tiny_model(tokenizer), prompts, SPEC)
    assert [len(lengths) for lengths in best.seqlens["packed_input_ids"]] == [5, 5]


def test_one_response_per_prompt_is_refused_where_responses_are_compared():
    settings_of_one = {"generation": {"responses_per_prompt": 1}}
    for settings in ({}, {"baseline": "leave_one_out", "scale": "none"}, {"baseline": "none"}):
        with pytest.raises(ValueError, match="responses_per_prompt above 1"):
            GRPOInterface(**settings_of_one, **settings)
    GRPOInterface(**settings_of_one, baseline="batch", scale="batch")
