"""The policy's training is PPO as written in its papers; `InterfaceContract` has what holds for any
interface."""

import math

import pytest
import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import AGE
from rlcli.api.model import MicroBatchSpec
from rlcli.api.partition import flat2d
from rlcli.interfaces.advantages.gae import GAEInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.ops.packing import action_mask
from rlcli.ops.policy_losses import Actions
from rlcli.testing.batches import make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import tiny_model

from .training import learn, rate, with_settings

SPEC = MicroBatchSpec()
LIMITLESS = {"early_stop_imp_ratio": None}
EARNED = {"kl_ctl": 0.0, "disable_value": True, "adv_norm": False}
"""Advantages are what a response earned, and nothing else."""


class TestContract(InterfaceContract):
    name = "ppo_actor"
    args = {"minibatches": 2, "ppo_epochs": 2}


class TestContractOfConstantAggregation(InterfaceContract):
    """A weight that does not count tokens, and ratios of whole responses."""

    name = "ppo_actor"
    args = {
        "minibatches": 2,
        "policy_loss": "sequence",
        "loss_aggregation": "constant",
        "loss_constant": 7.0,
        "entropy_coef": 0.1,
    }
    # TestContract tries every value of every argument
    test_every_argument_matters = None
    test_every_variant_trains = None


def ppo(**settings):
    """(the interface for advantages, that of the policy)."""
    return with_settings(
        {"minibatches": 1, **LIMITLESS, **settings}, GAEInterface, PPOActorInterface
    )


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
        {
            "adv_norm": False,
            "mask_no_eos_with_zero": True,
            "reward_output_bias": 0.5,
            "disable_value": True,
        },
        {"mask_too_long": True},
        {
            "adv_norm": False,
            "reward_output_scaling": 3.0,
            "reward_output_bias": 0.5,
            "max_reward_clip": 1.0,
        },
        {"adv_norm": False, "use_dense_reward": True, "reward_output_scaling": 0.5},
        {
            "adv_norm": False,
            "use_dense_reward": True,
            "reward_delta": False,
            "max_reward_clip": 0.8,
        },
        {"use_decoupled_loss": True},
        {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.1},
        {"recompute_logprob": True},
        {"group_adv_norm": True},
        {"kl_in": "loss", "kl_ctl": 0.7, "kl_estimator": "k3", "gae_lambda": 0.9},
        {"entropy_coef": 0.3},
        {"generation": {"temperature": 0.7}},
        {"policy_loss": "gspo", "eps_clip": 0.05},
        {
            "eps_clip": 0.05,
            "eps_clip_high": 0.15,
            "loss_aggregation": "constant",
            "loss_constant": 5.0,
        },
        {
            "loss_aggregation": "sequence",
            "use_decoupled_loss": True,
            "behav_imp_weight_cap": 1.1,
            "entropy_coef": 0.3,
        },
        {"policy_loss": "gspo", "mask_too_long": True, "loss_aggregation": "sequence"},
        {"policy_loss": "sapo"},
        {"policy_loss": "dppo_kl", "eps_clip": 0.05},
        {
            "use_decoupled_loss": True,
            "behav_imp_weight_level": "sequence",
            "behav_imp_weight_mode": "mask",
            "behav_imp_weight_cap": 1.1,
        },
        {
            "adv_norm": False,
            "use_dense_reward": True,
            "reward_output_scaling": 3.0,
            "max_reward_clip": 0.8,
        },
        {
            "use_decoupled_loss": True,
            "kl_in": "loss",
            "kl_ctl": 0.7,
            "kl_estimator": "k3",
            "kl_gradient": "naive",
        },
    ],
    ids=lambda settings: ",".join(settings) or "defaults",
)
def test_gradient_is_that_of_the_formula(step_by_hand, settings):
    """Gradient, loss and KL are those of PPO written out by hand."""
    advantages, policy = ppo(**settings)
    stats, sequences = step_by_hand(advantages, policy)
    kl = [value for sequence in sequences for value in sequence["trained_kl"]]
    assert stats["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-4, abs=1e-6)
    assert ("kl_penalty" in stats) == (advantages.kl_in == "loss")


def test_token_beyond_the_clip_gets_no_gradient(rollout, sampled_by):
    model = tiny_model()
    data = sampled_by(model, rollout)
    data.data["packed_logprobs"] -= 1.0  # every ratio is e, far above 1.2
    advantages, policy = ppo(**EARNED)
    data.data["rewards"].fill_(1.0)
    stats = learn(policy, advantages, model, data)
    assert stats["grad_norm"] == 0
    assert stats["clip_fraction"] == 1
    data.data["rewards"].fill_(-1.0)  # a bad response always gets less likely
    assert learn(policy, advantages, model, data)["grad_norm"] > 0.1


def test_higher_reward_raises_the_likelihood_of_that_response(rollout, sampled_by):
    changes = []
    for reward in (0.0, 5.0):
        model = tiny_model(lr=0.01)
        data = sampled_by(model, rollout)
        data.data["rewards"].fill_(0.0)
        data.data["rewards"][3] = reward
        before = data.data["packed_logprobs"].split(data.flat_seqlens("packed_logprobs"))[3].sum()
        advantages, policy = ppo(kl_ctl=0.0, disable_value=True)
        learn(policy, advantages, model, data)
        after = (
            sampled_by(model, data)
            .data["packed_logprobs"]
            .split(data.flat_seqlens("packed_logprobs"))[3]
            .sum()
        )
        changes.append(float(after - before))
    assert changes[1] > changes[0] + 0.01


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_policy_that_equals_its_reference_pays_no_penalty(rollout, sampled_by, kl_in):
    data = sampled_by(tiny_model(), rollout)
    free, bound = tiny_model(), tiny_model()
    for model, kl_ctl in ((free, 0.0), (bound, 10.0)):
        advantages, policy = ppo(kl_ctl=kl_ctl, kl_in=kl_in)
        learn(policy, advantages, model, data)
    torch.testing.assert_close(weights(free), weights(bound))


@pytest.mark.parametrize(
    "limit", [{"early_stop_imp_ratio": 0.5}, {"early_stop_imp_ratio": None, "early_stop_kl": -10.0}]
)
def test_early_stop_leaves_weights_and_schedule_unchanged(rollout, sampled_by, limit):
    model = tiny_model()
    before = weights(model)
    advantages, policy = ppo(**{"minibatches": 2, **limit})
    stats = learn(policy, advantages, model, sampled_by(model, rollout))
    assert torch.equal(weights(model), before)
    assert model.module.steps == 0
    assert model.module.scheduled == [], "the schedule stays too"
    assert stats["update_skipped"] == 2
    assert stats["importance_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert model.version.global_step == 1


def test_temperature_divides_the_logits_in_training_as_in_sampling(rollout):
    """With log-probs at the policy's own temperature every ratio is 1."""
    model = tiny_model()
    advantages, policy = ppo(generation=GenerationHyperparameters(temperature=0.7))
    rollout.update_(policy.inference(model, rollout, SPEC))
    assert learn(policy, advantages, model, rollout)["importance_ratio"] == pytest.approx(
        1.0, abs=1e-6
    )
    advantages, cold = ppo()
    assert learn(cold, advantages, tiny_model(), rollout)["importance_ratio"] != pytest.approx(
        1.0, abs=1e-2
    )


def test_every_response_is_dealt_once_per_epoch_in_a_new_order(rollout, sampled_by):
    """Every response is dealt once per epoch, in another order in each epoch and step."""
    model, dealt = tiny_model(), []
    original = model.module.train_batch

    def watched(minibatch, *args, **kwargs):
        dealt.append(list(minibatch.ids))
        return original(minibatch, *args, **kwargs)

    model.module.train_batch = watched
    advantages, policy = ppo(minibatches=4, ppo_epochs=2)
    learn(policy, advantages, model, sampled_by(model, rollout))
    first, second = dealt[:4], dealt[4:]
    assert sorted(flat2d(first)) == sorted(flat2d(second)) == sorted(rollout.ids)
    assert [len(ids) for ids in dealt] == [2] * 8
    assert first != second
    dealt.clear()
    advantages, policy = ppo(minibatches=4)
    learn(policy, advantages, model, rollout)
    assert dealt != first, "the version seeds the deal"


def test_without_penalty_no_kl_is_reported(rollout):
    advantages, policy = ppo(kl_ctl=0.0)
    assert "kl" not in learn(policy, advantages, tiny_model(), rollout)


def test_statistics_of_the_step(rollout):
    advantages, policy = ppo(minibatches=4)
    stats = learn(policy, advantages, tiny_model(), rollout)
    assert stats["lr"] == 0.1
    assert math.isfinite(stats["grad_norm"])
    assert stats["loss_weight"] == float((~rollout.data["prompt_mask"]).sum())


def test_policy_learns_from_the_chosen_responses_only(rollout, sampled_by):
    """The others have no gradient, and count in no mean."""
    model, twin = tiny_model(), tiny_model()
    data = sampled_by(model, rollout, spread=0.3)
    data.data["rewards"] = torch.tensor([1.0, 0.0] * 8)
    best, policy = ppo(**EARNED, train_on_best=1)
    stats = learn(policy, best, model, data)
    every, _ = ppo(**EARNED)
    batch, _ = rate(every, twin, data)
    batch.data["loss_mask"] &= torch.cat(
        [
            torch.full((length,), number % 2 == 0)
            for number, length in enumerate(batch.flat_seqlens("loss_mask"))
        ]
    )
    expected = policy.train_step(twin, batch, SPEC)
    assert stats["loss_weight"] == expected["loss_weight"]
    assert stats["loss"] == pytest.approx(expected["loss"])
    for name, gradient in twin.module.gradient.items():
        torch.testing.assert_close(model.module.gradient[name], gradient)


RECOMPUTED = [
    {},
    {"policy_loss": "gspo"},
    {"recompute_logprob": True},
    {"use_decoupled_loss": True},
]


@pytest.mark.parametrize("settings", RECOMPUTED, ids=str)
@pytest.mark.parametrize(
    ("age", "name"), [(None, "sampler_gap"), (0, "sampler_gap"), (2, "policy_drift")]
)
def test_distance_to_the_sampler_is_named_by_the_age_of_the_samples(
    rollout, sampled_by, settings, age, name
):
    """It is the mean distance of the log-probs as the step begins, over whole responses."""
    model = tiny_model()
    current = sampled_by(model, rollout).data["packed_logprobs"].clone()
    sampled = sampled_by(model, rollout, spread=0.3).data["packed_logprobs"]
    rollout.data["proximal_logprobs"] = current
    if age is not None:
        rollout.metadata[AGE] = [age] * rollout.bs
    response = action_mask(rollout.data["prompt_mask"], rollout.flat_seqlens("packed_input_ids"))
    expected = float((current - sampled).abs()[response].mean())
    assert expected > 0.2
    advantages, policy = ppo(ppo_epochs=3, **settings)
    stats = learn(policy, advantages, model, rollout)
    assert stats[name] == pytest.approx(expected, rel=1e-5)
    assert {name} == {"sampler_gap", "policy_drift"} & stats.keys()


@pytest.mark.parametrize("settings", RECOMPUTED, ids=str)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_of_stale_samples_is_that_of_the_policy_as_the_step_begins(
    rollout, sampled_by, settings, estimator
):
    """Not that of the policy that sampled them, which here is the reference itself, nor of the
    policy after it."""
    model = tiny_model()
    current = sampled_by(model, rollout).data["packed_logprobs"].clone()
    sampled = sampled_by(model, rollout, spread=0.3).data["packed_logprobs"]
    rollout.data |= {"proximal_logprobs": current, "packed_ref_logprobs": sampled.clone()}
    rollout.metadata[AGE] = [0, 2] * (rollout.bs // 2)
    response = action_mask(rollout.data["prompt_mask"], rollout.flat_seqlens("packed_input_ids"))
    difference = (current - sampled)[response].double()
    expected = float((difference.exp() * ((-difference).expm1() + difference)).mean())
    assert expected > 0.02
    advantages, policy = ppo(ppo_epochs=3, kl_estimator=estimator, **settings)
    assert learn(policy, advantages, model, rollout)["kl"] == pytest.approx(expected, rel=1e-4)


def test_as_many_responses_are_sampled_as_the_settings_say(tokenizer):
    prompts = make_batch(["packed_prompts"], [[(3, 1)], [(1, 1)], [(2, 1)]])
    policy = PPOActorInterface(generation={"max_new_tokens": 6, "responses_per_prompt": 3})
    output = policy.generate(tiny_model(tokenizer), prompts, SPEC)
    assert [len(lengths) for lengths in output.seqlens["packed_input_ids"]] == [3, 3, 3]
    assert output.data["seq_no_eos_mask"].dtype is torch.bool


SAMPLER = torch.tensor([0.6, 0.3, 0.1])
OLD_POLICY = torch.tensor([0.3, 0.3, 0.4])
REFERENCE_POLICY = torch.tensor([0.2, 0.5, 0.3])


def every_token(**columns):
    """Three responses of one token, one for each token there is."""
    ids = ["a", "b", "c"]
    data = SequenceSample.from_default(
        ids=ids,
        seqlens=[2, 2, 2],
        data={
            "packed_input_ids": torch.tensor([9, 0, 9, 1, 9, 2]),
            "prompt_mask": torch.tensor([True, False] * 3),
        },
    )
    ones = {name: [[1]] * 3 for name in columns}
    data.update_(SequenceSample.from_default(ids=ids, seqlens=ones, data=columns))
    return data


def test_the_penalty_of_a_decoupled_loss_has_the_gradient_of_the_kl():
    """In expectation over the tokens of the sampler, by its probabilities, the gradient is that of
    the KL of the policy from the reference, which is written out."""
    logits = torch.tensor([0.5, 0.2, 0.3]).log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - REFERENCE_POLICY.log())).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    data = every_token(
        advantages=torch.zeros(3),
        loss_mask=torch.ones(3, dtype=torch.bool),
        loss_weights=OLD_POLICY / SAMPLER,
        kl_weights=torch.ones(3),
        packed_ref_logprobs=REFERENCE_POLICY.log(),
    )
    columns = (logprobs, OLD_POLICY.log(), data.data["advantages"], data.data["loss_mask"])
    losses, _ = PPOActorInterface()._losses(Actions(*columns, [2] * 3), torch.zeros(3), data)
    (gradient,) = torch.autograd.grad((SAMPLER * losses).sum(), logits)
    torch.testing.assert_close(gradient, expected)
