"""The critic learns the returns of PPO as written out; `InterfaceContract` has what holds for any
interface."""

import statistics

import pytest
import torch

from rlcli.api.model import MicroBatchSpec
from rlcli.interfaces._sequences import select_sequences
from rlcli.interfaces.advantages.gae import GAEInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import TinyLM, TinyOutput, tiny_model

from .training import learn, rate, with_settings

SPEC = MicroBatchSpec()


class TestContract(InterfaceContract):
    name = "ppo_critic"
    args = {"minibatches": 2, "ppo_epochs": 2}


def ppo(**settings):
    """(the interface for advantages, that of the critic)."""
    return with_settings({"minibatches": 1, **settings}, GAEInterface, PPOCriticInterface)


def raw_values(model, batch):
    lengths = batch.flat_seqlens("packed_input_ids")
    return (
        TinyOutput(model.module.model, batch.data["packed_input_ids"], lengths)
        .values.detach()
        .float()
    )


def moments(sequences):
    """(mean, standard deviation) of the returns that are trained on; never below 0.1."""
    returns = [
        value
        for sequence in sequences
        for value, is_trained in zip(sequence["returns"], sequence["trained"], strict=True)
        if is_trained
    ]
    return statistics.fmean(returns), (max(statistics.pvariance(returns), 0.01) + 1e-5) ** 0.5


def loss_by_hand(critic, sequences, model, old_values, mean, std):
    loss, count, start = torch.zeros((), dtype=torch.float64), 0, 0
    for sequence in sequences:
        new = TinyOutput(model, sequence["tokens"], [len(sequence["tokens"])]).values
        for t, is_trained in enumerate(sequence["trained"]):
            if is_trained:
                old, target = old_values[start + t], sequence["returns"][t]
                if critic.value_norm:
                    target = min(max((target - mean) / std, -5.0), 5.0)
                near = old + (new[t] - old).clamp(-critic.value_eps_clip, critic.value_eps_clip)
                loss = loss + torch.maximum(
                    _error(critic, new[t] - target), _error(critic, near - target)
                )
                count += 1
        start += len(sequence["tokens"])
    return loss, count


def _error(critic, gap):
    half_square = gap**2 / 2
    return half_square if critic.value_loss == "mse" or gap.abs() < 10 else 10 * (gap.abs() - 5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"value_norm": False, "value_eps_clip": 0.1},
        {"value_norm": False, "value_loss": "huber", "reward_output_scaling": 20.0},
        {"gae_lambda": 0.8, "discount": 0.9, "kl_estimator": "k3"},
        {"mask_too_long": True, "bootstrap_no_eos": False},
        {"use_dense_reward": True, "value_norm_type": "ma"},
    ],
    ids=lambda settings: ",".join(settings) or "defaults",
)
def test_gradient_is_that_of_the_formula(rollout, sampled_by, by_hand, settings):
    """Gradient and loss are those of PPO written out by hand."""
    model, (advantages, critic) = tiny_model(), ppo(**settings)
    sampled_by(model, rollout, spread=0.3)
    generator = torch.Generator().manual_seed(3)
    old = raw_values(model, rollout) + 0.4 * torch.randn(
        len(rollout.data["values"]), generator=generator
    )
    # in units of the reward, which are the model's until statistics move
    rollout.data["values"] = old
    sequences = by_hand(advantages, rollout)
    stats = learn(critic, advantages, model, rollout)
    twin = TinyLM()
    loss, count = loss_by_hand(critic, sequences, twin, old.double().tolist(), *moments(sequences))
    (loss / count).backward()
    assert stats["loss_weight"] == count
    assert stats["loss"] == pytest.approx(float(loss.detach()) / count, rel=1e-5)
    for name in ("embedding", "value_head"):
        torch.testing.assert_close(
            model.module.gradient[name], getattr(twin, name).grad, atol=1e-6, rtol=1e-4
        )
    assert not model.module.gradient["head"].any()


def test_values_have_the_units_of_the_reward(rollout, by_hand):
    model, (advantages, critic) = tiny_model(), ppo(value_norm_beta=0.5)
    torch.testing.assert_close(
        critic.inference(model, rollout, SPEC).data["values"], raw_values(model, rollout)
    )
    means, squares = [], []
    for reward in (4.0, 15.0):
        rollout.data["rewards"] = rollout.data["rewards"] * 0 + reward + torch.arange(16) / 4
        mean, std = moments(by_hand(advantages, rollout))
        means.append(mean)
        squares.append(std**2 - 1e-5 + mean**2)
        learn(critic, advantages, model, rollout)
    # Weights of an exponential average that starts at zero, by 1/2 per step: a quarter and a half,
    # of three quarters.
    mean, square = (means[0] + 2 * means[1]) / 3, (squares[0] + 2 * squares[1]) / 3
    expected = raw_values(model, rollout) * (square - mean**2 + 1e-5) ** 0.5 + mean
    torch.testing.assert_close(
        critic.inference(model, rollout, SPEC).data["values"], expected, atol=1e-3, rtol=1e-4
    )


def test_old_values_are_normalised_before_the_statistics_are_updated(rollout):
    """A critic that is trained once on its own predictions clips nothing."""
    model, (advantages, critic) = tiny_model(), ppo(value_eps_clip=1e-3)
    critic.normalizer.update(torch.tensor([5.0, 9.0]))
    rollout.update_(critic.inference(model, rollout, SPEC))
    assert learn(critic, advantages, model, rollout)["value_clip_fraction"] == 0


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant_one(rollout, by_hand):
    settings = {"kl_ctl": 0.0, "bootstrap_no_eos": False}
    rollout.data["values"] = torch.repeat_interleave(
        rollout.data["rewards"], torch.tensor(rollout.flat_seqlens("packed_input_ids"))
    )
    advantages, critic = ppo(**settings)
    assert learn(critic, advantages, tiny_model(), rollout)["explained_variance"] == 1
    rollout.data["values"].fill_(3.0)
    advantages, critic = ppo(**settings)
    stats = learn(critic, advantages, tiny_model(), rollout)
    assert stats["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert stats["value"] == pytest.approx(3.0)
    assert stats["return"] == pytest.approx(moments(by_hand(advantages, rollout))[0])


def test_explained_variance_is_0_for_returns_that_differ_only_by_rounding(rollout):
    """No response earns anything: returns are 0 but for the last bits."""
    rollout.data["rewards"].zero_()
    advantages, critic = ppo(kl_ctl=0.0, bootstrap_no_eos=False, discount=0.99)
    stats = learn(critic, advantages, tiny_model(), rollout)
    assert stats["return"] == pytest.approx(0.0, abs=1e-12)
    assert stats["explained_variance"] == 0


@pytest.mark.parametrize("n_mbs", [1, 2, 3, 8])
def test_values_within_the_clip_are_not_counted_as_clipped(rollout, n_mbs):
    """`old + (new - old)` is not `new` to the last bit; that is not a clip."""
    model, (advantages, critic) = tiny_model(), ppo(value_norm=False, value_eps_clip=100.0)
    model.module.model.float()
    rollout.data["values"] = torch.randn(
        len(rollout.data["values"]), generator=torch.Generator().manual_seed(1)
    )
    stats = learn(critic, advantages, model, rollout, MicroBatchSpec(n_mbs=n_mbs))
    assert stats["value_clip_fraction"] == 0


def test_clipped_returns_are_counted(rollout):
    """Those beyond five standard deviations, of the tokens that are trained on."""
    rollout.data["rewards"] = torch.tensor([20.0] + [0.0] * 15)
    advantages, critic = ppo(kl_ctl=0.0)
    batch, _ = rate(advantages, tiny_model(), rollout)
    returns, mask = batch.data["returns"].double(), batch.data["loss_mask"]
    normalizer = critic.normalizer
    normalizer.update(torch.tensor([-0.1, 0.1]))
    before = normalizer.state_dict()
    normalizer.update(returns, mask)
    beyond = ((returns[mask] - normalizer.mean).abs() > 5 * normalizer.std).double().mean()
    assert beyond > 0
    normalizer.load_state_dict(before)
    stats = learn(critic, advantages, tiny_model(), rollout)
    assert stats["return_clip_fraction"] == pytest.approx(float(beyond))
    _, plain = ppo(value_norm=False)
    assert "return_clip_fraction" not in learn(plain, advantages, tiny_model(), rollout)


def test_critic_learns_from_the_chosen_responses_only(rollout):
    """Not even its statistics of returns see the others."""
    rollout.data["rewards"] = torch.tensor([1.0, 0.0] * 8)
    best, critic = ppo(train_on_best=1)
    every, twin = ppo()
    stats = learn(critic, best, tiny_model(), rollout)
    expected = learn(
        twin, every, tiny_model(), select_sequences(rollout, torch.arange(16) % 2 == 0)
    )
    for name in ("loss", "loss_weight", "value", "return", "explained_variance", "grad_norm"):
        assert stats[name] == pytest.approx(expected[name])
    assert critic.normalizer.state_dict() == twin.normalizer.state_dict()
