"""The policy's training is PPO as written in its papers; `InterfaceContract` checks what holds for any interface."""

import itertools
import math

import pytest
import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import AGE
from rlcli.api.model import MicroBatchSpec, call_interface
from rlcli.api.partition import flat2d
from rlcli.errors import UsageError
from rlcli.interfaces._best_of import keep_best
from rlcli.interfaces._rollout import prepare
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.ops.reduce import identity
from rlcli.ops.rewards import action_mask
from rlcli.testing.batches import make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import TinyLM, tiny_model

SPEC = MicroBatchSpec()
LIMITLESS = {"early_stop_imp_ratio": None}


class TestContract(InterfaceContract):
    name = "ppo_actor"
    args = {"minibatches": 2, "ppo_epochs": 2, "adaptive_kl_ctl": True, "adaptive_kl_horizon": 100.0}


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.module.model.parameters()])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"adv_norm": False, "gae_lambda": 0.9, "discount": 0.95},
        {"adv_norm": False, "kl_estimator": "k2", "kl_ctl": 0.7},
        {"adv_norm": False, "kl_estimator": "k3", "kl_ctl": 0.7, "bootstrap_no_eos": False},
        {"eps_clip": 0.05},
        {"c_clip": 1.2, "eps_clip": 0.1},
        {"adv_norm": False, "mask_no_eos_with_zero": True, "disable_value": True},
        {"mask_too_long": True},
        {"adv_norm": False, "reward_output_scaling": 3.0, "reward_output_bias": 0.5, "max_reward_clip": 1.0},
        {"adv_norm": False, "use_dense_reward": True, "reward_output_scaling": 0.5},
        {"adv_norm": False, "use_dense_reward": True, "reward_delta": False, "max_reward_clip": 0.8},
        {"use_decoupled_loss": True},
        {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.1},
        {"recompute_logprob": True},
        {"group_adv_norm": True, "generation": {"responses_per_prompt": 2}},
        {"entropy_coef": 0.3},
        {"generation": {"temperature": 0.7}},
        {"policy_loss": "gspo", "eps_clip": 0.05},
        {"eps_clip": 0.05, "eps_clip_high": 0.15, "loss_aggregation": "constant", "loss_constant": 5.0},
        {"loss_aggregation": "sequence", "use_decoupled_loss": True, "behav_imp_weight_cap": 1.1, "entropy_coef": 0.3},
        {"policy_loss": "gspo", "mask_too_long": True, "loss_aggregation": "sequence"},
    ],
    ids=lambda settings: ",".join(settings) or "defaults",
)
def test_gradient_is_that_of_the_formula(rollout, sampled_by, by_hand, loss_by_hand, settings):
    """gradient and loss are those of PPO written out by hand"""
    model = tiny_model()
    data = sampled_by(model, rollout, spread=0.3)
    args = PPOActorInterface(minibatches=1, **LIMITLESS, **settings)
    sequences = by_hand(args, data, args.kl_ctl)
    stats = args.train_step(model, data, SPEC)
    twin = TinyLM()
    loss, count = loss_by_hand(args, sequences, twin)
    (loss / count).backward()
    assert stats["loss_weight"] == count
    assert stats["loss"] == pytest.approx(float(loss.detach()) / count, rel=1e-5, abs=1e-6)
    for name in ("embedding", "head"):
        torch.testing.assert_close(model.module.gradient[name], getattr(twin, name).grad, atol=1e-6, rtol=1e-4)
    values = [zip(sequence["trained_kl"], sequence["response"], strict=True) for sequence in sequences]
    kl = [value for value, counts in itertools.chain(*values) if counts]
    assert stats["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-4, abs=1e-6)


def test_a_token_beyond_the_clip_gets_no_gradient(rollout, sampled_by):
    """beyond the clip nothing pulls further"""
    model = tiny_model()
    data = sampled_by(model, rollout)
    data.data["packed_logprobs"] -= 1.0  # every ratio is e, far above 1.2
    data.data["rewards"].fill_(1.0)
    settings = {"kl_ctl": 0.0, "disable_value": True, "adv_norm": False}
    stats = PPOActorInterface(minibatches=1, **settings, **LIMITLESS).train_step(model, data, SPEC)
    assert stats["grad_norm"] == 0
    assert stats["clip_fraction"] == 1
    data.data["rewards"].fill_(-1.0)  # away from what was bad there is always a way
    stats = PPOActorInterface(minibatches=1, **settings, **LIMITLESS).train_step(model, data, SPEC)
    assert stats["grad_norm"] > 0.1


def test_a_higher_reward_makes_a_response_more_likely(rollout, sampled_by):
    """more reward for one response makes it more likely"""
    changes = []
    for reward in (0.0, 5.0):
        model = tiny_model(lr=0.01)
        data = sampled_by(model, rollout)
        data.data["rewards"].fill_(0.0)
        data.data["rewards"][3] = reward
        before = data.data["packed_logprobs"].split(data.flat_seqlens("packed_logprobs"))[3].sum()
        PPOActorInterface(minibatches=1, kl_ctl=0.0, disable_value=True, **LIMITLESS).train_step(model, data, SPEC)
        after = sampled_by(model, data).data["packed_logprobs"].split(data.flat_seqlens("packed_logprobs"))[3].sum()
        changes.append(float(after - before))
    assert changes[1] > changes[0] + 0.01


@pytest.mark.parametrize(
    ("settings", "returns"),
    [
        ({}, (0.925, 0.975)),
        ({"use_decoupled_loss": True}, (0.925, 0.975)),
        ({"recompute_logprob": True}, (0.825, 0.9)),
        ({"recompute_logprob": True, "use_decoupled_loss": True}, (0.925, 0.975)),
    ],
    ids=["sampler", "decoupled", "recomputed", "both"],
)
def test_the_kl_penalty_uses_the_log_probs_of_the_sampling_policy(settings, returns):
    """by hand: of the sampler's log-probs, or of those that were recomputed in their place"""
    lengths = {"packed_input_ids": [[3]], "prompt_mask": [[3]], "values": [[3]], "rewards": [[1]]}
    lengths |= {key: [[2]] for key in ("packed_logprobs", "proximal_logprobs", "packed_ref_logprobs")}
    data = SequenceSample(
        ids=["a"],
        seqlens=lengths | {"seq_no_eos_mask": [[1]]},
        data={
            "packed_input_ids": torch.tensor([1, 2, 3]),
            "prompt_mask": torch.tensor([True, False, False]),
            "values": torch.zeros(3),
            "rewards": torch.ones(1),
            "seq_no_eos_mask": torch.tensor([False]),
            "packed_logprobs": torch.tensor([-1.0, -2.0]),
            "proximal_logprobs": torch.tensor([-0.75, -1.25]),
            "packed_ref_logprobs": torch.tensor([-1.5, -2.25]),
        },
    )
    args = PPOActorInterface(minibatches=1, adv_norm=False, **settings)
    batch = prepare(args, data, 0.1, identity)
    assert batch.data["returns"].tolist() == pytest.approx(returns)  # 1 - 0.1 · (what is still to be paid)


def test_a_policy_that_equals_its_reference_pays_no_penalty(rollout, sampled_by):
    """equal to the reference, nothing is paid"""
    data = sampled_by(tiny_model(), rollout)
    free, bound = tiny_model(), tiny_model()
    for model, kl_ctl in ((free, 0.0), (bound, 10.0)):
        PPOActorInterface(minibatches=1, kl_ctl=kl_ctl).train_step(model, data, SPEC)
    torch.testing.assert_close(weights(free), weights(bound))


@pytest.mark.parametrize(
    "limit", [{"early_stop_imp_ratio": 0.5}, {"early_stop_imp_ratio": None, "early_stop_kl": -10.0}]
)
def test_an_early_stop_leaves_weights_and_schedule_unchanged(rollout, sampled_by, limit):
    """an early stop leaves weights and schedule alone"""
    model = tiny_model()
    before = weights(model)
    stats = call_interface(PPOActorInterface(minibatches=2, **limit), "train_step", model, sampled_by(model, rollout))
    assert torch.equal(weights(model), before)
    assert model.module.steps == 0
    assert model.module.scheduled == [], "the schedule stays too"
    assert stats["update_skipped"] == 2
    assert stats["importance_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert model.version.global_step == 1


def test_temperature_divides_the_logits_in_training_as_in_sampling(rollout):
    """with the temperature's own log-probs every ratio is 1"""
    model = tiny_model()
    actor = PPOActorInterface(generation=GenerationHyperparameters(temperature=0.7), minibatches=1)
    rollout.update_(actor.inference(model, rollout, SPEC))
    assert actor.train_step(model, rollout, SPEC)["importance_ratio"] == pytest.approx(1.0, abs=1e-6)
    cold = PPOActorInterface(minibatches=1, **LIMITLESS)
    assert cold.train_step(tiny_model(), rollout, SPEC)["importance_ratio"] != pytest.approx(1.0, abs=1e-2)


def test_every_response_is_dealt_once_per_epoch_in_a_new_order(rollout, sampled_by):
    """every response is dealt once per epoch, anew in each"""
    model, dealt = tiny_model(), []
    original = model.module.train_batch
    model.module.train_batch = lambda data, *a, **k: (dealt.append(list(data.ids)), original(data, *a, **k))[1]
    actor = PPOActorInterface(minibatches=4, ppo_epochs=2, **LIMITLESS)
    call_interface(actor, "train_step", model, sampled_by(model, rollout))
    first, second = dealt[:4], dealt[4:]
    assert sorted(flat2d(first)) == sorted(flat2d(second)) == sorted(rollout.ids)
    assert [len(minibatch) for minibatch in dealt] == [2] * 8
    assert first != second
    dealt.clear()
    PPOActorInterface(minibatches=4, **LIMITLESS).train_step(model, rollout, SPEC)
    assert dealt != first, "the version seeds the deal"


def test_the_adaptive_coefficient_follows_the_kl_per_response(rollout):
    """the KL coefficient follows the KL per response"""
    responses = rollout.data["seq_no_eos_mask"].numel()
    for gap, direction in ((5.0, 1), (0.0, -1)):
        rollout.data["packed_ref_logprobs"] = rollout.data["packed_logprobs"] - gap
        actor = PPOActorInterface(adaptive_kl_ctl=True, adaptive_kl_target=1.0, adaptive_kl_horizon=1000, **LIMITLESS)
        stats = actor.train_step(tiny_model(), rollout, SPEC)
        assert stats["kl"] == pytest.approx(math.exp(-gap) - 1 + gap, abs=1e-5)
        assert stats["kl_coef"] == 0.1, "the coefficient that was in force"
        assert actor.controller.coef == pytest.approx(0.1 * (1 + direction * 0.2 * responses / 1000))


def test_best_of_k_keeps_the_highest_rewards_and_prefers_shorter_responses(rollout):
    """best of k keeps the highest rewards, of equals the shorter"""
    rollout.data["rewards"] = torch.tensor([0.0, 1.0] + [1.0, 1.0] + [2.0, 1.0] * 6)
    best = keep_best(rollout, 1)
    lengths = rollout.seqlens["packed_input_ids"]
    picked = [1, 0 if lengths[1][0] <= lengths[1][1] else 1, *[0] * 6]
    assert best.seqlens["packed_input_ids"] == [[lengths[i][p]] for i, p in enumerate(picked)]
    assert best.data["rewards"].tolist() == [1.0, 1.0] + [2.0] * 6
    assert best.data["packed_logprobs"].numel() == best.data["packed_input_ids"].numel() - 8
    trained = prepare(PPOActorInterface(generation_size=2), rollout, 0.1, identity)
    assert trained.data["rewards"].numel() == 8


def test_reference_and_critic_are_needed_only_if_used(rollout):
    """no reference is needed without KL, no critic if disabled"""
    few = rollout.select(set(rollout.keys) - {"values", "packed_ref_logprobs"})
    stats = PPOActorInterface(kl_ctl=0.0, disable_value=True).train_step(tiny_model(), few, SPEC)
    assert "kl" not in stats, "nothing to compare with"
    with pytest.raises(UsageError, match="packed_ref_logprobs"):
        PPOActorInterface(disable_value=True).train_step(tiny_model(), few, SPEC)
    with pytest.raises(UsageError, match="disable_value"):
        PPOActorInterface(kl_ctl=0.0).train_step(tiny_model(), few, SPEC)


def test_batch_statistics_match_the_batch(rollout):
    """stats of the batch are what their names say"""
    stats = PPOActorInterface(**LIMITLESS).train_step(tiny_model(), rollout, SPEC)
    assert stats["shaped_reward"] == pytest.approx(float(rollout.data["rewards"].mean()))
    assert stats["response_length"] == pytest.approx(float((~rollout.data["prompt_mask"]).sum()) / 16)
    assert stats["no_eos_fraction"] == pytest.approx(float(rollout.data["seq_no_eos_mask"].float().mean()))
    assert stats["lr"] == 0.1
    assert math.isfinite(stats["grad_norm"])
    assert stats["loss_weight"] == float((~rollout.data["prompt_mask"]).sum())


def test_the_mean_advantage_weights_every_response_equally(rollout, sampled_by):
    """not every token, or long responses would count for more"""
    settings = {"adv_norm": False, "disable_value": True, "kl_ctl": 0.0, "gae_lambda": 1.0}
    stats = PPOActorInterface(**LIMITLESS, **settings).train_step(tiny_model(), rollout, SPEC)
    rewards = rollout.data["rewards"]  # the advantage of each token of a response, where nothing is expected
    assert stats["advantage"] == pytest.approx(float(rewards.mean()), rel=1e-5)
    assert stats["advantage_abs"] == pytest.approx(float(rewards.abs().mean()), rel=1e-5)


RECOMPUTED = [{}, {"policy_loss": "gspo"}, {"recompute_logprob": True}, {"use_decoupled_loss": True}]


@pytest.mark.parametrize("settings", RECOMPUTED, ids=str)
@pytest.mark.parametrize(("age", "name"), [(None, "sampler_gap"), (0, "sampler_gap"), (2, "policy_drift")])
def test_the_distance_to_the_sampler_is_a_gap_or_a_drift_by_sample_age(rollout, sampled_by, settings, age, name):
    """the mean distance of the log-probs as the step begins, of whole responses"""
    model = tiny_model()
    current = sampled_by(model, rollout).data["packed_logprobs"].clone()
    sampled = sampled_by(model, rollout, spread=0.3).data["packed_logprobs"]
    rollout.data["proximal_logprobs"] = current
    if age is not None:
        rollout.metadata[AGE] = [age] * rollout.bs
    response = action_mask(rollout.data["prompt_mask"], rollout.flat_seqlens("packed_input_ids"))
    actor = PPOActorInterface(minibatches=1, ppo_epochs=3, **settings, **LIMITLESS)
    expected = float((current - sampled).abs()[response].mean())
    assert expected > 0.2
    stats = actor.train_step(model, rollout, SPEC)
    assert stats[name] == pytest.approx(expected, rel=1e-5)
    assert {name} == {"sampler_gap", "policy_drift"} & stats.keys()


@pytest.mark.parametrize("settings", RECOMPUTED, ids=str)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_kl_of_stale_samples_is_that_of_the_policy_at_step_begin(rollout, sampled_by, settings, estimator):
    """not that of the policy that sampled them, which here is the reference itself, nor of the policy after it"""
    model = tiny_model()
    current = sampled_by(model, rollout).data["packed_logprobs"].clone()
    sampled = sampled_by(model, rollout, spread=0.3).data["packed_logprobs"]
    rollout.data |= {"proximal_logprobs": current, "packed_ref_logprobs": sampled.clone()}
    rollout.metadata[AGE] = [0, 2] * (rollout.bs // 2)
    response = action_mask(rollout.data["prompt_mask"], rollout.flat_seqlens("packed_input_ids"))
    difference = (current - sampled)[response].double()
    expected = float((difference.exp() * ((-difference).expm1() + difference)).mean())
    assert expected > 0.02
    actor = PPOActorInterface(minibatches=1, ppo_epochs=3, kl_estimator=estimator, **settings, **LIMITLESS)
    assert actor.train_step(model, rollout, SPEC)["kl"] == pytest.approx(expected, rel=1e-4)


def test_clipped_rewards_are_counted(rollout):
    """of sixteen rewards, two are above the clip and one below"""
    rollout.data["rewards"] = torch.tensor([0.0] * 13 + [1.6, -1.4, 30.0])
    settings = {"reward_output_bias": 0.5, "reward_output_scaling": 2.0, "max_reward_clip": 2.0}
    stats = PPOActorInterface(**LIMITLESS, **settings).train_step(tiny_model(), rollout, SPEC)
    assert stats["reward_clip_fraction"] == pytest.approx(3 / 16)
    assert PPOActorInterface(**LIMITLESS).train_step(tiny_model(), rollout, SPEC)["reward_clip_fraction"] == 1 / 16


def test_best_of_k_samples_k_responses(tokenizer):
    prompts = make_batch(["packed_prompts"], [[(3, 1)], [(1, 1)], [(2, 1)]])
    interface = PPOActorInterface(generation=GenerationHyperparameters(max_new_tokens=6), generation_size=3)
    out = interface.generate(tiny_model(tokenizer), prompts, SPEC)
    assert [len(lengths) for lengths in out.seqlens["packed_input_ids"]] == [3, 3, 3]
