"""Actor and critic over the tiny engine: what must hold whatever the batch is cut into."""

import math

import pytest
import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.model import MicroBatchSpec
from rlcli.errors import UsageError
from rlcli.interfaces._best_of import keep_best
from rlcli.interfaces._rollout import prepare
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.ops.reduce import identity
from rlcli.testing.tiny_engine import TinyOutput, TinyRanks, tiny_model

SPEC = MicroBatchSpec()
LIMITLESS = {"early_stop_imp_ratio": None}


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.module.model.parameters()])


def old_policy(model, data):
    """`data` with the log-probs of the model itself as the sampling policy's."""
    output = TinyOutput(model.module.model, data.data["packed_input_ids"], data.flat_seqlens("packed_input_ids"))
    data.data["packed_logprobs"] = output.logprobs.detach().float()
    return data


@pytest.mark.parametrize("interface", [PPOActorInterface, PPOCriticInterface])
def test_micro_batches_change_nothing(interface, rollout):
    results = []
    for spec in (
        SPEC,
        MicroBatchSpec(n_mbs=2),
        MicroBatchSpec(n_mbs=4),
        MicroBatchSpec(max_tokens_per_mb=20),
    ):
        model = tiny_model(lr=0.01)
        stats = interface(minibatches=2, ppo_epochs=2, **LIMITLESS).train_step(model, rollout, spec)
        assert model.module.steps == 4
        results.append((stats, weights(model), model.module.micro_batches))
    for stats, trained, _ in results[1:]:
        assert stats.keys() == results[0][0].keys()
        for name, value in stats.items():
            assert value == pytest.approx(results[0][0][name], rel=1e-6, abs=1e-9), name
        torch.testing.assert_close(trained, results[0][1], atol=1e-8, rtol=1e-8)
    assert results[0][2] < results[1][2] < results[2][2], "the batch really was cut"


@pytest.mark.parametrize("interface", [PPOActorInterface, PPOCriticInterface])
@pytest.mark.parametrize("shares", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2, 3, 4, 6, 7], [5, 1]], [list(range(8)), []]])
def test_ranks_change_nothing(interface, rollout, shares):
    settings = {"minibatches": 4, "adaptive_kl_ctl": True, "adaptive_kl_horizon": 100, **LIMITLESS}
    alone, alone_interface = tiny_model(lr=0.01), interface(**settings)
    expected = alone_interface.train_step(alone, rollout, SPEC)

    ranks = TinyRanks(2)

    def one_rank(rank):
        model, one = tiny_model(lr=0.01, ranks=ranks, rank=rank), interface(**settings)
        return (
            one.train_step(model, rollout.select_indices(shares[rank]), SPEC),
            weights(model),
            one.state_dict(),
        )

    for stats, trained, state in ranks.run(one_rank):
        for name, value in expected.items():
            assert stats[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
        torch.testing.assert_close(trained, weights(alone), atol=1e-8, rtol=1e-8)
        assert state["kl_controller"]["coef"] == pytest.approx(alone_interface.controller.coef)


def test_actor_gradient_is_that_of_a_loss_written_out_by_hand(rollout):
    """One minibatch, no normalisation, no clip in reach: d/dθ of -Σ A·ratio / tokens, over padded rows."""
    model = tiny_model()
    data = old_policy(model, rollout)
    args = {"minibatches": 1, "adv_norm": False, "eps_clip": 10.0, **LIMITLESS}
    actor = PPOActorInterface(**args)
    batch = prepare(actor, data, 0.1, identity)
    actor.train_step(model, data, SPEC)

    twin = tiny_model().module.model
    lengths = data.flat_seqlens("packed_input_ids")
    total, count = 0.0, 0
    start = action = 0
    for length in lengths:
        tokens = data.data["packed_input_ids"][start : start + length]
        logprobs = TinyOutput(twin, tokens, [length]).logprobs
        for t in range(length - 1):
            if not data.data["prompt_mask"][start + t + 1]:
                ratio = (logprobs[t] - data.data["packed_logprobs"][action + t]).exp()
                total, count = total - ratio * batch.data["advantages"][action + t], count + 1
        start, action = start + length, action + length - 1
    (total / count).backward()
    for name, parameter in twin.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        torch.testing.assert_close(model.module.gradient[name], gradient, atol=1e-6, rtol=1e-5)


def test_what_is_off_the_response_is_never_read(rollout):
    """NaN and Inf on prompt positions change nothing, and prompts get no gradient of their own."""
    clean, dirty = tiny_model(), tiny_model()
    expected = PPOActorInterface(**LIMITLESS).train_step(clean, rollout, SPEC)
    off = rollout.data["prompt_mask"][1:] & rollout.data["prompt_mask"][:-1]
    starts = torch.cat([torch.tensor([0]), torch.tensor(rollout.flat_seqlens("packed_input_ids")).cumsum(0)[:-1]])
    action = 0
    for start, length in zip(starts.tolist(), rollout.flat_seqlens("packed_input_ids"), strict=True):
        for t in range(length - 1):
            if off[start + t]:
                rollout.data["packed_logprobs"][action + t] = float("nan")
                rollout.data["packed_ref_logprobs"][action + t] = float("inf")
                rollout.data["values"][start + t] = float("nan")
        action += length - 1
    got = PPOActorInterface(**LIMITLESS).train_step(dirty, rollout, SPEC)
    assert got == pytest.approx(expected)
    torch.testing.assert_close(weights(dirty), weights(clean))


@pytest.mark.parametrize(
    "limit", [{"early_stop_imp_ratio": 0.5}, {"early_stop_imp_ratio": None, "early_stop_kl": -10.0}]
)
def test_early_stop_skips_the_step_whole(rollout, limit):
    model = tiny_model()
    before = weights(model)
    stats = PPOActorInterface(minibatches=2, **limit).train_step(model, old_policy(model, rollout), SPEC)
    assert torch.equal(weights(model), before)
    assert model.module.steps == 0
    assert model.module.scheduled == [], "the schedule stays too"
    assert stats["update_skipped"] == 2
    assert stats["importance_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert model.version.global_step == 1


def test_training_raises_the_likelihood_of_what_was_rewarded(rollout):
    model = tiny_model(lr=0.5)
    data = old_policy(model, rollout)
    actor = PPOActorInterface(kl_ctl=0.0, minibatches=1, disable_value=True)
    solved = torch.repeat_interleave(data.data["solved"], torch.tensor(data.flat_seqlens("packed_logprobs")))
    response = prepare(actor, data, 0.0, identity).data["loss_mask"]

    def margin():
        lp = old_policy(model, data).data["packed_logprobs"]
        return float(lp[response & solved].mean() - lp[response & ~solved].mean())

    before = margin()
    for _ in range(5):
        actor.train_step(model, old_policy(model, data), SPEC)
    assert margin() > before + 0.1
    assert model.module.scheduled == [0, 1, 2, 3, 4]


def test_temperature_divides_the_logits_in_training_as_in_sampling(rollout):
    """With the temperature's own log-probs as the old policy, every ratio is 1."""
    model = tiny_model()
    actor = PPOActorInterface(generation=GenerationHyperparameters(temperature=0.7), minibatches=1)
    rollout.update_(actor.inference(model, rollout, SPEC))
    assert actor.train_step(model, rollout, SPEC)["importance_ratio"] == pytest.approx(1.0, abs=1e-6)
    cold = PPOActorInterface(minibatches=1, **LIMITLESS)
    assert cold.train_step(tiny_model(), rollout, SPEC)["importance_ratio"] != pytest.approx(1.0, abs=1e-2)


def test_entropy_is_reported_and_only_trained_when_asked(rollout):
    plain, bonus = tiny_model(), tiny_model()
    a = PPOActorInterface(minibatches=1, **LIMITLESS).train_step(plain, rollout, SPEC)
    b = PPOActorInterface(minibatches=1, entropy_coef=0.5, **LIMITLESS).train_step(bonus, rollout, SPEC)
    assert a["entropy"] == pytest.approx(b["entropy"])
    assert b["loss"] == pytest.approx(a["loss"] - 0.5 * a["entropy"])
    assert not torch.allclose(weights(plain), weights(bonus))


def test_adaptive_kl_is_fed_with_the_true_kl(rollout):
    """KL per response far above the target raises the coefficient, whatever its scale."""
    responses = rollout.data["seq_no_eos_mask"].numel()
    for gap, direction in ((5.0, 1), (0.0, -1)):
        rollout.data["packed_ref_logprobs"] = rollout.data["packed_logprobs"] - gap
        actor = PPOActorInterface(adaptive_kl_ctl=True, adaptive_kl_target=1.0, adaptive_kl_horizon=1000, **LIMITLESS)
        stats = actor.train_step(tiny_model(), rollout, SPEC)
        assert stats["kl"] == pytest.approx(gap, abs=1e-5)
        assert stats["kl_coef"] == 0.1, "the coefficient that was in force"
        assert actor.controller.coef == pytest.approx(0.1 * (1 + direction * 0.2 * responses / 1000))
        again = PPOActorInterface(adaptive_kl_ctl=True)
        again.load_state_dict(actor.state_dict())
        assert again.controller.coef == actor.controller.coef


def test_critic_values_go_out_in_real_units_and_clip_around_them(rollout):
    model, critic = tiny_model(), PPOCriticInterface(minibatches=1)
    raw = critic.inference(model, rollout, SPEC).data["values"]
    rollout.data["rewards"] += 100.0
    rollout.data["values"] = raw
    stats = critic.train_step(model, rollout, SPEC)
    assert stats["return"] > 50 or rollout.data["rewards"].clamp(max=20).min() == 20
    after = critic.inference(model, rollout, SPEC).data["values"]
    back = critic.normalizer.normalize(after, clip=False)
    twin = TinyOutput(model.module.model, rollout.data["packed_input_ids"], rollout.flat_seqlens("packed_input_ids"))
    torch.testing.assert_close(back, twin.values.detach().float(), atol=1e-3, rtol=1e-3)
    restored = PPOCriticInterface(minibatches=1)
    restored.load_state_dict(critic.state_dict())
    torch.testing.assert_close(restored.inference(model, rollout, SPEC).data["values"], after)


def test_the_critic_learns(rollout):
    model, critic = tiny_model(lr=0.2), PPOCriticInterface(minibatches=2, kl_ctl=0.0, value_eps_clip=10.0)
    losses = []
    for _ in range(60):
        rollout.update_(critic.inference(model, rollout, SPEC))
        stats = critic.train_step(model, rollout, SPEC)
        losses.append(stats["loss"])
    assert losses[-1] < 0.7 * losses[1]
    assert stats["explained_variance"] > 0.3


def test_old_values_are_normalised_before_the_statistics_move(rollout):
    """Trained once on its own predictions nothing is clipped, although the statistics have just moved."""
    model = tiny_model()
    critic = PPOCriticInterface(minibatches=1, value_eps_clip=1e-3)
    critic.normalizer.update(torch.tensor([5.0, 9.0]))
    rollout.update_(critic.inference(model, rollout, SPEC))
    assert critic.train_step(model, rollout, SPEC)["value_clip_fraction"] == 0


def test_capped_tokens_leave_the_count(rollout):
    rollout.update_(
        type(rollout).from_default(
            ids=rollout.ids,
            seqlens={"proximal_logprobs": rollout.seqlens["packed_logprobs"]},
            data={"proximal_logprobs": rollout.data["packed_logprobs"] + 0.1},
        )
    )
    full = PPOActorInterface(minibatches=1, use_decoupled_loss=True, **LIMITLESS)
    tokens = full.train_step(tiny_model(), rollout, SPEC)["loss_weight"]
    rollout.data["proximal_logprobs"][5:9] += 3.0
    capped = PPOActorInterface(minibatches=1, use_decoupled_loss=True, behav_imp_weight_cap=2.0, **LIMITLESS)
    dropped = int(prepare(full, rollout, 0.1, identity).data["loss_mask"][5:9].sum())
    assert dropped > 0
    assert capped.train_step(tiny_model(), rollout, SPEC)["loss_weight"] == tokens - dropped


def test_truncated_responses_are_left_out_when_asked(rollout):
    batch = prepare(PPOActorInterface(mask_too_long=True), rollout, 0.1, identity)
    cut = torch.repeat_interleave(
        rollout.data["seq_no_eos_mask"], torch.tensor(rollout.flat_seqlens("packed_logprobs"))
    )
    assert cut.any()
    assert not batch.data["loss_mask"][cut].any()
    assert torch.equal(batch.data["loss_mask"][~cut], batch.data["response_mask"][~cut])


def test_the_value_after_a_cut_off_response_counts_unless_told_otherwise(rollout):
    plain = {"kl_ctl": 0.0, "adv_norm": False}
    with_it = prepare(PPOActorInterface(**plain), rollout, 0.0, identity)
    without = prepare(PPOActorInterface(bootstrap_no_eos=False, **plain), rollout, 0.0, identity)
    lengths = rollout.flat_seqlens("packed_input_ids")
    last_values = rollout.data["values"][torch.tensor(lengths).cumsum(0) - 1] * rollout.data["seq_no_eos_mask"]
    last_action = torch.tensor(lengths).sub(1).cumsum(0) - 1
    torch.testing.assert_close(without.data["returns"][last_action], rollout.data["rewards"])
    torch.testing.assert_close(with_it.data["returns"][last_action], rollout.data["rewards"] + last_values)


def test_best_of_k_keeps_the_highest_rewards_the_shorter_first(rollout):
    rollout.data["rewards"] = torch.tensor([0.0, 1.0] + [1.0, 1.0] + [2.0, 1.0] * 6)
    best = keep_best(rollout, 1)
    lengths = rollout.seqlens["packed_input_ids"]
    picked = [1, 0 if lengths[1][0] <= lengths[1][1] else 1, *[0] * 6]
    assert best.seqlens["packed_input_ids"] == [[lengths[i][p]] for i, p in enumerate(picked)]
    assert best.data["rewards"].tolist() == [1.0, 1.0] + [2.0] * 6
    assert best.data["packed_logprobs"].numel() == best.data["packed_input_ids"].numel() - 8
    trained = prepare(PPOActorInterface(generation_size=2), rollout, 0.1, identity)
    assert trained.data["rewards"].numel() == 8


def test_group_normalised_advantages_have_mean_zero_in_each_group(rollout):
    settings = {"generation": {"responses_per_prompt": 2}, "group_adv_norm": True}
    batch = prepare(PPOActorInterface(**settings), rollout, 0.1, identity)
    for sample in batch.unpack():
        kept = sample.data["advantages"][sample.data["loss_mask"]]
        assert float(kept.mean()) == pytest.approx(0.0, abs=1e-5)


def test_without_reference_or_critic(rollout):
    few = rollout.select(set(rollout.keys) - {"values", "packed_ref_logprobs"})
    stats = PPOActorInterface(kl_ctl=0.0, disable_value=True).train_step(tiny_model(), few, SPEC)
    assert stats["kl"] == 0
    with pytest.raises(UsageError, match="packed_ref_logprobs"):
        PPOActorInterface(disable_value=True).train_step(tiny_model(), few, SPEC)
    with pytest.raises(UsageError, match="disable_value"):
        PPOActorInterface(kl_ctl=0.0).train_step(tiny_model(), few, SPEC)


def test_batch_statistics(rollout):
    stats = PPOActorInterface(**LIMITLESS).train_step(tiny_model(), rollout, SPEC)
    assert stats["reward"] == pytest.approx(float(rollout.data["rewards"].mean()))
    assert stats["solved"] == stats["reward"]
    assert stats["response_length"] == pytest.approx(float((~rollout.data["prompt_mask"]).sum()) / 16)
    assert stats["no_eos_fraction"] == pytest.approx(float(rollout.data["seq_no_eos_mask"].float().mean()))
    assert stats["lr"] == 0.1
    assert math.isfinite(stats["grad_norm"])
    assert stats["loss_weight"] == float((~rollout.data["prompt_mask"]).sum())


@pytest.mark.parametrize("interface", [PPOActorInterface, PPOCriticInterface])
def test_an_empty_share_is_legal(interface, rollout):
    model = tiny_model()
    stats = interface().train_step(model, rollout.select_indices([]), SPEC)
    assert stats["update_skipped"] == 4
    assert model.module.steps == 0
