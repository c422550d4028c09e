"""What a call for advantages computes, by hand, for whole batches however they are spread; both
estimators share it."""

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import AGE
from rlcli.interfaces._sequences import best_of_each, chosen_sequences
from rlcli.interfaces.advantages.gae import GAEInterface
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.testing.batches import make_batch
from rlcli.testing.tiny_engine import TinyRanks, tiny_model

from .training import SPEC, means, rate, read_by

ESTIMATORS = [GAEInterface, GroupRelativeInterface]


def one_response(**logprobs):
    """A prompt of one token, a response of two with reward 1, and values 0."""
    tokens = {key: [[3]] for key in ("packed_input_ids", "prompt_mask", "values")}
    actions = {key: [[2]] for key in logprobs}
    sequences = {key: [[1]] for key in ("rewards", "seq_no_eos_mask")}
    return SequenceSample.from_default(
        ids=["a"],
        seqlens=tokens | actions | sequences,
        data={
            "packed_input_ids": torch.tensor([1, 2, 3]),
            "prompt_mask": torch.tensor([True, False, False]),
            "values": torch.zeros(3),
            "rewards": torch.ones(1),
            "seq_no_eos_mask": torch.tensor([False]),
            **{key: torch.tensor(numbers) for key, numbers in logprobs.items()},
        },
    )


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
def test_kl_penalty_is_that_of_the_policy_that_sampled(settings, returns):
    """Of the sampler's log-probs, or of those that were recomputed in their place."""
    data = one_response(
        packed_logprobs=[-1.0, -2.0],
        proximal_logprobs=[-0.75, -1.25],
        packed_ref_logprobs=[-1.5, -2.25],
    )
    batch, _ = rate(GAEInterface(adv_norm=False, **settings), tiny_model(), data)
    # 1 - 0.1 · (what is still to be paid)
    assert batch.data["returns"].tolist() == pytest.approx(returns)
    old = "proximal_logprobs" if settings else "packed_logprobs"
    assert torch.equal(batch.data["old_logprobs"], data.data[old])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_only_the_keys_that_the_settings_call_for_are_written(rollout, estimator):
    every = {"advantages", "returns", "loss_mask", "old_logprobs"}
    for settings, additional in [
        ({"kl_in": "reward"}, set()),
        ({"kl_in": "loss"}, {"kl_weights"}),
        ({"kl_in": "reward", "use_decoupled_loss": True}, {"loss_weights"}),
        ({"kl_in": "reward", "train_on_best": 2}, {"chosen"}),
    ]:
        interface = estimator(**settings)
        output = interface.inference(tiny_model(), read_by(interface, "inference", rollout), SPEC)
        assert output.keys == every | additional == set(interface.writes("inference").needed)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_weight_of_the_penalty_in_the_loss_is_that_of_the_step(rollout, estimator):
    """It is that of the controller on actions of responses, and 0 on prompts."""
    batch, numbers = rate(estimator(kl_in="loss", kl_ctl=0.3), tiny_model(), rollout)
    responses = [
        ~mask[1:] for mask in batch.data["prompt_mask"].split(batch.flat_seqlens("prompt_mask"))
    ]
    torch.testing.assert_close(batch.data["kl_weights"], 0.3 * torch.cat(responses))
    assert numbers["kl_coef"] == pytest.approx(0.3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_penalty_in_the_loss_does_not_change_advantages(rollout, estimator):
    in_loss, in_reward, free = (
        rate(estimator(**settings), tiny_model(), rollout)[0].data["advantages"]
        for settings in (
            {"kl_in": "loss", "kl_ctl": 0.5},
            {"kl_in": "reward", "kl_ctl": 0.5},
            {"kl_ctl": 0.0},
        )
    )
    assert torch.equal(in_loss, free)
    assert not torch.equal(in_reward, free)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize(("gap", "direction"), [(5.0, 1), (0.0, -1)])
def test_adaptive_weight_follows_the_kl_per_response(rollout, estimator, kl_in, gap, direction):
    rollout.data["packed_ref_logprobs"] = rollout.data["packed_logprobs"] - gap
    interface = estimator(
        kl_in=kl_in,
        kl_ctl=0.1,
        adaptive_kl_ctl=True,
        adaptive_kl_target=1.0,
        adaptive_kl_horizon=80,
    )
    _, numbers = rate(interface, tiny_model(), rollout)
    assert numbers["kl_coef"] == pytest.approx(0.1), "the weight of this step"
    changed = 0.1 * (1 + direction * 0.2 * 16 / 80)
    assert interface.controller.coef == pytest.approx(changed)
    _, numbers = rate(interface, tiny_model(), rollout)
    assert numbers["kl_coef"] == pytest.approx(changed)


@pytest.mark.parametrize(
    "settings", [{"recompute_logprob": True}, {"use_decoupled_loss": True}], ids=str
)
def test_adaptive_weight_follows_the_trained_policy(rollout, settings):
    """The samplers of stale samples are far from the reference, which the trained policy equals."""
    rollout.data["proximal_logprobs"] = rollout.data["packed_ref_logprobs"].clone()
    rollout.metadata[AGE] = [2] * rollout.bs
    interface = GAEInterface(
        adaptive_kl_ctl=True, adaptive_kl_target=1.0, adaptive_kl_horizon=80, **settings
    )
    rate(interface, tiny_model(), rollout)
    assert interface.controller.coef == pytest.approx(0.1 * (1 - 0.2 * 16 / 80))


def test_adaptive_weight_survives_a_restart(rollout):
    interface, resumed = (
        GAEInterface(adaptive_kl_ctl=True, adaptive_kl_horizon=80) for _ in range(2)
    )
    rate(interface, tiny_model(), rollout)
    resumed.load_state_dict(interface.state_dict())
    assert resumed.controller.coef == interface.controller.coef != 0.1


def test_best_responses_have_the_highest_rewards_and_the_shorter_of_equals(rollout):
    rollout.data["rewards"] = torch.tensor([0.0, 1.0] + [1.0, 1.0] + [2.0, 1.0] * 6)
    lengths = rollout.seqlens["packed_input_ids"]
    best = [1, 0 if lengths[1][0] <= lengths[1][1] else 1, *[0] * 6]
    chosen = best_of_each(rollout, 1)
    assert chosen.tolist() == [index == best[sample] for sample in range(8) for index in range(2)]
    batch, numbers = rate(GAEInterface(train_on_best=1), tiny_model(), rollout)
    assert torch.equal(batch.data["chosen"], chosen)
    selected = chosen_sequences(batch)
    assert selected.seqlens["packed_input_ids"] == [
        [lengths[sample][index]] for sample, index in enumerate(best)
    ]
    assert selected.data["rewards"].tolist() == [1.0, 1.0] + [2.0] * 6
    assert selected.data["packed_logprobs"].numel() == selected.data["packed_input_ids"].numel() - 8
    assert numbers["shaped_reward"] == pytest.approx(14 / 8)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_responses_that_are_not_chosen_do_not_matter(rollout, estimator):
    """The chosen ones get the advantages that they have in a batch without the others."""
    rollout = make_batch(
        sorted(rollout.keys), [[(2, 3), (2, 1), (2, 5), (2, 2)], [(1, 2), (1, 6), (1, 4), (1, 3)]]
    )
    rollout.data["rewards"] = torch.tensor([0.0, 1.0, 2.0, 0.5, 3.0, 1.0, 2.5, 0.0])
    settings = {"kl_in": "reward", "adv_norm": True, "use_decoupled_loss": True}
    selected = chosen_sequences(
        rate(estimator(**settings, train_on_best=2), tiny_model(), rollout)[0]
    )
    of_rollout = sorted(rollout.keys & selected.keys)
    alone, _ = rate(estimator(**settings), tiny_model(), selected.select(of_rollout))
    for key in ("advantages", "returns", "loss_mask", "old_logprobs", "loss_weights"):
        torch.testing.assert_close(selected.data[key], alone.data[key])


def test_neither_reference_nor_critic_is_needed_without_penalty_and_values(rollout):
    few = rollout.select(set(rollout.keys) - {"values", "packed_ref_logprobs"})
    rate(GAEInterface(kl_ctl=0.0, disable_value=True), tiny_model(), few)
    rate(GroupRelativeInterface(kl_ctl=0.0), tiny_model(), few)
    with pytest.raises(KeyError, match="packed_ref_logprobs"):
        rate(GAEInterface(disable_value=True), tiny_model(), few)
    with pytest.raises(KeyError, match="values"):
        rate(GAEInterface(kl_ctl=0.0), tiny_model(), few)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_numbers_are_those_that_their_names_say(rollout, estimator):
    _, numbers = rate(estimator(), tiny_model(), rollout)
    assert numbers["shaped_reward"] == pytest.approx(float(rollout.data["rewards"].mean()))
    assert numbers["response_length"] == pytest.approx(
        float((~rollout.data["prompt_mask"]).sum()) / 16
    )
    assert numbers["no_eos_fraction"] == pytest.approx(
        float(rollout.data["seq_no_eos_mask"].float().mean())
    )


def test_mean_advantage_counts_every_response_alike(rollout):
    """Otherwise long responses would count for more."""
    settings = {"adv_norm": False, "disable_value": True, "kl_ctl": 0.0, "gae_lambda": 1.0}
    _, numbers = rate(GAEInterface(**settings), tiny_model(), rollout)
    # the advantage of each token of a response is its reward
    rewards = rollout.data["rewards"] - 0.5
    assert numbers["advantage"] == pytest.approx(float(rollout.data["rewards"].mean()), rel=1e-5)
    _, numbers = rate(GAEInterface(**settings, reward_output_bias=0.5), tiny_model(), rollout)
    assert numbers["advantage"] == pytest.approx(float(rewards.mean()), rel=1e-5)
    assert numbers["advantage_abs"] == pytest.approx(0.5, rel=1e-5)


def answered(masks):
    """Responses to one prompt with reward 1 and values 0, one letter for each token: `a` where it
    was sampled."""
    tokens = "".join(masks)
    is_prompt = torch.tensor([token != "a" for token in tokens])
    return SequenceSample.from_default(
        ids=["a"],
        seqlens=[[len(mask) for mask in masks]],
        data={
            "packed_input_ids": torch.ones(len(tokens), dtype=torch.int64),
            "prompt_mask": is_prompt,
            "values": torch.zeros(len(tokens)),
            "packed_logprobs": torch.zeros(len(tokens) - len(masks)),
            "rewards": torch.ones(len(masks)),
            "seq_no_eos_mask": torch.zeros(len(masks)).bool(),
        },
    )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_overlong_penalty_counts_what_an_episode_observed(estimator):
    """An episode with three tokens observed between its turns, a single turn of six, and a response
    without tokens. `max_new_tokens` counts six in the first, too."""
    settings = {"kl_ctl": 0.0, "adv_norm": False, "overlong_limit": 8, "overlong_buffer": 4}
    batch, numbers = rate(
        estimator(**settings), tiny_model(), answered(["PPaaoooa", "PPaaaaaa", "PP"])
    )
    assert batch.data["returns"].tolist() == [0, *[0.5] * 2, *[0] * 3, 0.5, 0, *[0.5] * 6, 0]
    assert numbers["shaped_reward"] == pytest.approx(2 / 3)
    assert numbers["response_length"] == 3, "of sampled tokens"


def test_clipped_rewards_are_counted(rollout):
    """Of sixteen rewards, two are above the clip and one is below."""
    rollout.data["rewards"] = torch.tensor([0.0] * 13 + [1.6, -1.4, 30.0])
    settings = {"reward_output_bias": 0.5, "reward_output_scaling": 2.0, "max_reward_clip": 2.0}
    for interface, share in ((GAEInterface(**settings), 3 / 16), (GAEInterface(), 1 / 16)):
        _, numbers = rate(interface, tiny_model(), rollout)
        assert numbers["reward_clip_fraction"] == pytest.approx(share)
    _, numbers = rate(GAEInterface(use_dense_reward=True), tiny_model(), rollout)
    assert "reward_clip_fraction" not in numbers, "it is about task rewards"


OVER_THE_BATCH = [
    (GAEInterface, {}),
    (GAEInterface, {"group_adv_norm": True}),
    (GAEInterface, {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.1, "kl_in": "loss"}),
    (GroupRelativeInterface, {"baseline": "batch", "scale": "batch"}),
    (GroupRelativeInterface, {"adv_norm": True, "kl_in": "reward", "credit": "to_go"}),
    (GroupRelativeInterface, {"train_on_best": 2, "adv_norm": True}),
]
SHARES = (
    [range(8)],
    [range(4), range(4, 8)],
    [range(1), range(1, 8)],
    [range(5), range(0), range(5, 8)],
)


@pytest.mark.parametrize(("estimator", "settings"), OVER_THE_BATCH, ids=str)
def test_advantages_do_not_depend_on_how_the_batch_is_spread_over_ranks(
    rollout, estimator, settings
):
    """Nor does the weight that the adaptive controller gives to the penalty in the next step."""
    adaptive = {"adaptive_kl_ctl": True, "adaptive_kl_target": 1.0, "adaptive_kl_horizon": 80}
    outputs = [
        spread(rollout, shares, lambda: estimator(**adaptive, **settings)) for shares in SHARES
    ]
    (expected, expected_weight), *others = outputs
    assert expected_weight != estimator().kl_ctl
    for batch, weight in others:
        assert weight == pytest.approx(expected_weight, rel=1e-12)
        assert batch.keys == expected.keys
        for key in batch.keys:
            torch.testing.assert_close(
                batch.data[key], expected.data[key], rtol=1e-5, atol=1e-6, msg=key
            )
        assert means(batch.metadata) == pytest.approx(means(expected.metadata), rel=1e-5)


def spread(rollout, shares, make):
    """(the outputs of all ranks, each with its share of the batch;
    the weight of the penalty afterwards)."""
    ranks = TinyRanks(len(shares))
    interfaces = [make() for _ in shares]

    def work(rank):
        data = read_by(interfaces[rank], "inference", rollout).select_indices(shares[rank])
        return interfaces[rank].inference(tiny_model(ranks=ranks, rank=rank), data, SPEC)

    outputs = ranks.run(work)
    (weight,) = {interface.controller.coef for interface in interfaces}
    return SequenceSample.gather(outputs), weight
