"""The critic learns the returns of PPO as written out; `InterfaceContract` checks what holds for any interface."""

import itertools
import statistics

import pytest
import torch

from rlcli.api.model import MicroBatchSpec
from rlcli.interfaces._rollout import prepare
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.ops.reduce import identity
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import TinyLM, TinyOutput, tiny_model

SPEC = MicroBatchSpec()


class TestContract(InterfaceContract):
    name = "ppo_critic"
    args = {"minibatches": 2, "ppo_epochs": 2, "adaptive_kl_ctl": True, "adaptive_kl_horizon": 100.0}


def raw_values(model, batch):
    lengths = batch.flat_seqlens("packed_input_ids")
    return TinyOutput(model.module.model, batch.data["packed_input_ids"], lengths).values.detach().float()


def moments(sequences):
    """(mean, standard deviation) of the returns that are trained on; never below 0.1."""
    pairs = [zip(sequence["returns"], sequence["trained"], strict=True) for sequence in sequences]
    returns = [value for value, trains in itertools.chain(*pairs) if trains]
    return statistics.fmean(returns), (max(statistics.pvariance(returns), 0.01) + 1e-5) ** 0.5


def loss_by_hand(args, sequences, model, old_values, mean, std):
    loss, count, start = torch.zeros((), dtype=torch.float64), 0, 0
    for sequence in sequences:
        new = TinyOutput(model, sequence["tokens"], [len(sequence["tokens"])]).values
        for t, trains in enumerate(sequence["trained"]):
            if trains:
                old = old_values[start + t]
                target = sequence["returns"][t]
                if args.value_norm:
                    target = min(max((target - mean) / std, -5.0), 5.0)
                near = old + (new[t] - old).clamp(-args.value_eps_clip, args.value_eps_clip)
                loss = loss + torch.maximum(_error(args, new[t] - target), _error(args, near - target))
                count += 1
        start += len(sequence["tokens"])
    return loss, count


def _error(args, gap):
    half_square = gap**2 / 2
    return half_square if args.value_loss == "mse" or gap.abs() < 10 else 10 * (gap.abs() - 5)


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
    """gradient and loss are those of PPO written out by hand"""
    model, args = tiny_model(), PPOCriticInterface(minibatches=1, **settings)
    sampled_by(model, rollout, spread=0.3)
    generator = torch.Generator().manual_seed(3)
    old = raw_values(model, rollout) + 0.4 * torch.randn(len(rollout.data["values"]), generator=generator)
    rollout.data["values"] = old  # in units of the reward, which are the model's until statistics move
    sequences = by_hand(args, rollout, args.kl_ctl)
    stats = args.train_step(model, rollout, SPEC)
    twin = TinyLM()
    loss, count = loss_by_hand(args, sequences, twin, old.double().tolist(), *moments(sequences))
    (loss / count).backward()
    assert stats["loss_weight"] == count
    assert stats["loss"] == pytest.approx(float(loss.detach()) / count, rel=1e-5)
    for name in ("embedding", "value_head"):
        torch.testing.assert_close(model.module.gradient[name], getattr(twin, name).grad, atol=1e-6, rtol=1e-4)
    assert not model.module.gradient["head"].any()


def test_values_are_returned_in_the_units_of_the_reward(rollout, by_hand):
    """values go out in units of the reward, scaled as learned"""
    model, critic = tiny_model(), PPOCriticInterface(minibatches=1, value_norm_beta=0.5)
    torch.testing.assert_close(critic.inference(model, rollout, SPEC).data["values"], raw_values(model, rollout))
    means, squares = [], []
    for reward in (4.0, 15.0):
        rollout.data["rewards"] = rollout.data["rewards"] * 0 + reward + torch.arange(16) / 4
        mean, std = moments(by_hand(critic, rollout, 0.1))
        means.append(mean)
        squares.append(std**2 - 1e-5 + mean**2)
        critic.train_step(model, rollout, SPEC)
    # Weights of an exponential average that starts at zero, by 1/2 per step: a quarter and a half, of three quarters.
    mean, square = (means[0] + 2 * means[1]) / 3, (squares[0] + 2 * squares[1]) / 3
    expected = raw_values(model, rollout) * (square - mean**2 + 1e-5) ** 0.5 + mean
    torch.testing.assert_close(critic.inference(model, rollout, SPEC).data["values"], expected, atol=1e-3, rtol=1e-4)


def test_old_values_are_normalised_before_the_statistics_are_updated(rollout):
    """trained once on its own predictions nothing is clipped"""
    model = tiny_model()
    critic = PPOCriticInterface(minibatches=1, value_eps_clip=1e-3)
    critic.normalizer.update(torch.tensor([5.0, 9.0]))
    rollout.update_(critic.inference(model, rollout, SPEC))
    assert critic.train_step(model, rollout, SPEC)["value_clip_fraction"] == 0


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant(rollout, by_hand):
    """explained variance is 1 for a perfect critic, else less"""
    settings = {"minibatches": 1, "kl_ctl": 0.0, "bootstrap_no_eos": False}
    rollout.data["values"] = torch.repeat_interleave(
        rollout.data["rewards"], torch.tensor(rollout.flat_seqlens("packed_input_ids"))
    )
    assert PPOCriticInterface(**settings).train_step(tiny_model(), rollout, SPEC)["explained_variance"] == 1
    rollout.data["values"].fill_(3.0)
    stats = PPOCriticInterface(**settings).train_step(tiny_model(), rollout, SPEC)
    assert stats["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert stats["value"] == pytest.approx(3.0)
    sequences = by_hand(PPOCriticInterface(**settings), rollout, 0.0)
    assert stats["return"] == pytest.approx(moments(sequences)[0])


def test_explained_variance_is_0_for_returns_that_differ_only_by_rounding(rollout):
    """no response earns anything: returns are 0 but for the last bits"""
    rollout.data["rewards"].zero_()
    critic = PPOCriticInterface(minibatches=1, kl_ctl=0.0, bootstrap_no_eos=False, discount=0.99)
    stats = critic.train_step(tiny_model(), rollout, SPEC)
    assert stats["return"] == pytest.approx(0.0, abs=1e-12)
    assert stats["explained_variance"] == 0


@pytest.mark.parametrize("n_mbs", [1, 2, 3, 8])
def test_values_within_the_clip_are_not_counted_as_clipped(rollout, n_mbs):
    """`old + (new - old)` is not `new` to the last bit; that is no clip"""
    model, critic = tiny_model(), PPOCriticInterface(minibatches=1, value_norm=False, value_eps_clip=100.0)
    model.module.model.float()
    rollout.data["values"] = torch.randn(len(rollout.data["values"]), generator=torch.Generator().manual_seed(1))
    assert critic.train_step(model, rollout, MicroBatchSpec(n_mbs=n_mbs))["value_clip_fraction"] == 0


def test_clipped_returns_are_counted(rollout):
    """those beyond five standard deviations, of the tokens that are trained on"""
    rollout.data["rewards"] = torch.tensor([20.0] + [0.0] * 15)
    critic = PPOCriticInterface(minibatches=1, kl_ctl=0.0)
    critic.normalizer.update(torch.tensor([-0.1, 0.1]))
    before = critic.normalizer.state_dict()
    assert critic.train_step(tiny_model(), rollout, SPEC)["return_clip_fraction"] > 0
    batch = prepare(critic, rollout, 0.0, identity)
    returns, mask = batch.data["returns"].double(), batch.data["loss_mask"]
    critic.normalizer.load_state_dict(before)
    critic.normalizer.update(returns, mask)
    beyond = ((returns[mask] - critic.normalizer.mean).abs() > 5 * critic.normalizer.std).double().mean()
    critic.normalizer.load_state_dict(before)
    stats = critic.train_step(tiny_model(), rollout, SPEC)
    assert stats["return_clip_fraction"] == pytest.approx(float(beyond))
    assert "return_clip_fraction" not in PPOCriticInterface(value_norm=False).train_step(tiny_model(), rollout, SPEC)
