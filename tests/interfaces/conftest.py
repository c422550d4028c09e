"""A rollout over the tiny engine's vocabulary, and policy gradients written out by hand to compare
with."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.tiny_engine import TinyLM, TinyOutput, tiny_model

from .training import learn

OF_ROLLOUTS = (
    "packed_input_ids", "prompt_mask", "packed_logprobs", "proximal_logprobs",
    "packed_ref_logprobs", "values", "dense_rewards", "rewards", "solved", "seq_no_eos_mask",
    "margins",
)  # fmt: skip
LOGPROBS = ("packed_logprobs", "proximal_logprobs", "packed_ref_logprobs")


@pytest.fixture
def rollout():
    """Eight samples of two responses each, of different lengths, with all that calls before
    training can find out."""
    return make_batch(OF_ROLLOUTS)


@pytest.fixture
def tokenizer():
    return DigitTokenizer()


@pytest.fixture
def sampled_by():
    """The function that gives a batch the log-probs of a model, or others that far from them."""

    def sampled(model, batch, spread=0.0):
        lengths = batch.flat_seqlens("packed_input_ids")
        logprobs = (
            TinyOutput(model.module.model, batch.data["packed_input_ids"], lengths)
            .logprobs.detach()
            .float()
        )
        generator = torch.Generator().manual_seed(7)
        for key in LOGPROBS:
            batch.data[key] = logprobs + spread * torch.randn(logprobs.shape, generator=generator)
        return batch

    return sampled


@pytest.fixture
def by_hand():
    return rollout_by_hand


@pytest.fixture
def step_by_hand(rollout, sampled_by):
    """The function that takes a training step on a rollout, and compares its loss and gradient with
    those of the formula: (an interface for advantages, that of a policy) → (the numbers of the
    step, what is trained on)."""

    def compare(advantages, policy):
        model, twin = tiny_model(), TinyLM()
        data = sampled_by(model, rollout, spread=0.3)
        sequences = rollout_by_hand(advantages, data)
        stats = learn(policy, advantages, model, data)
        loss, count = policy_loss_by_hand(policy, sequences, twin)
        (loss / count).backward()
        assert stats["loss_weight"] == count
        assert stats["loss"] == pytest.approx(float(loss.detach()) / count, rel=1e-5, abs=1e-6)
        for name in ("embedding", "head"):
            expected = getattr(twin, name).grad
            torch.testing.assert_close(model.module.gradient[name], expected, atol=1e-6, rtol=1e-4)
        return stats, sequences

    return compare


def rollout_by_hand(advantages, batch):
    """What is trained on, with the settings of an interface for advantages: for each sequence a
    dict of lists over its actions. One number at a time, in plain floats."""
    column = {key: batch.data[key].double().tolist() for key in batch.keys}
    sequences, token, action, number = [], 0, 0, 0
    for sample, lengths in enumerate(batch.seqlens["packed_input_ids"]):
        for length in lengths:
            per_token = {
                key: column[key][token : token + length]
                for key in ("prompt_mask", "values", "dense_rewards")
            }
            per_action = {key: column[key][action : action + length - 1] for key in LOGPROBS}
            ended = not column["seq_no_eos_mask"][number]
            sequence = _sequence(
                advantages, length, per_token, per_action, column["rewards"][number], ended
            )
            tokens = batch.data["packed_input_ids"][token : token + length]
            sequences.append(sequence | {"sample": sample, "tokens": tokens})
            token, action, number = token + length, action + length - 1, number + 1
    is_relative = hasattr(advantages, "baseline")
    return _normalised(advantages, (_compared if is_relative else _valued)(advantages, sequences))


def _compared(args, sequences):
    """Each response by what it earned, against what others did."""
    of_each = [_credits(args, sequence) for sequence in sequences]
    for index, sequence in enumerate(sequences):
        neighbours = [
            i for i, neighbour in enumerate(sequences) if neighbour["sample"] == sequence["sample"]
        ]
        in_group = [of_each[i] for i in neighbours]
        baseline = {
            "group": _mean_of(in_group),
            "leave_one_out": _mean_of([of_each[i] for i in neighbours if i != index]),
            "batch": _mean_of(of_each),
            "none": 0.0,
        }[args.baseline]
        scale = {
            "group": _deviation(in_group) + 1e-6,
            "batch": _deviation(of_each) + 1e-6,
            "mean": _mean_of(in_group) + 1e-6,
            "none": 1.0,
        }[args.scale]
        credits, response = iter(of_each[index]), sequence["response"]
        sequence["returns"] = [next(credits) if acted else 0.0 for acted in response]
        sequence["advantages"] = [
            (credit - baseline) / scale * acted
            for credit, acted in zip(sequence["returns"], response, strict=True)
        ]
    return sequences


def _credits(args, sequence):
    """Of the actions of a response of one turn: all that it earned, or what it earned from there
    on."""
    earned, response = sequence["earned"], sequence["response"]
    actions = [t for t, acted in enumerate(response) if acted]
    return [sum(earned if args.credit == "response" else earned[t:]) for t in actions]


def _mean_of(credits):
    """Each response counts equally."""
    return statistics.fmean(map(statistics.fmean, credits))


def _deviation(credits):
    """Of the credits of all actions, where each response counts equally."""
    return math.hypot(
        statistics.stdev(map(statistics.fmean, credits)),
        statistics.fmean(map(statistics.pvariance, credits)) ** 0.5,
    )


def _valued(args, sequences):
    """Each action by the values of a critic."""
    for sequence in sequences:
        values = [0.0] * len(sequence["values"]) if args.disable_value else sequence["values"]
        if sequence["ended"] or not args.bootstrap_no_eos:
            values[-1] = 0.0
        advantages, running = [], 0.0
        for t in reversed(range(len(sequence["earned"]))):
            error = sequence["earned"][t] + args.discount * values[t + 1] - values[t]
            running = error + args.discount * args.gae_lambda * running
            advantages.insert(0, running)
        sequence["advantages"] = advantages
        sequence["returns"] = [
            advantage + value for advantage, value in zip(advantages, values[:-1], strict=True)
        ]
    return sequences


def _sequence(args, length, per_token, per_action, reward, ended):
    actions = range(length - 1)
    response = [not per_token["prompt_mask"][t + 1] for t in actions]
    behaviour, proximal = per_action["packed_logprobs"], per_action["proximal_logprobs"]
    reference = per_action["packed_ref_logprobs"]
    old = proximal if args.use_decoupled_loss or args.recompute_logprob else behaviour
    trained = [response[t] and (ended or not args.mask_too_long) for t in actions]
    weights = [1.0 for _ in actions]
    if args.use_decoupled_loss:
        weights = _behaviour_weights(args, [proximal[t] - behaviour[t] for t in actions], trained)
    low, high = args.behav_imp_weight_floor or 0.0, args.behav_imp_weight_cap or math.inf
    if args.behav_imp_weight_mode == "truncate":
        weights = [min(max(weight, low), high) for weight in weights]
    else:
        trained = [trained[t] and low <= weights[t] <= high for t in actions]
    sampler = proximal if args.recompute_logprob and not args.use_decoupled_loss else behaviour
    kl = [_kl(args.kl_estimator, sampler[t] - reference[t]) * response[t] for t in actions]
    trained_kl = [
        math.exp(old[t] - behaviour[t]) * _kl("k3", old[t] - reference[t])
        for t in actions
        if response[t]
    ]
    earned = [-args.kl_ctl * kl[t] if args.kl_in == "reward" else 0.0 for t in actions]
    limit = args.max_reward_clip
    if args.use_dense_reward:
        for t in actions:
            if response[t]:
                score = per_token["dense_rewards"][t + 1] - (
                    per_token["dense_rewards"][t] if args.reward_delta else 0
                )
                earned[t] += min(max(score * args.reward_output_scaling, -limit), limit)
    elif length > 1 and response[-1]:
        score = (reward - args.reward_output_bias) * args.reward_output_scaling
        counts_zero = args.mask_no_eos_with_zero and not ended
        earned[-1] += 0.0 if counts_zero else min(max(score, -limit), limit)
    if args.overlong_buffer is not None and response and response[-1]:
        beyond = sum(response) - (args.overlong_limit - args.overlong_buffer)
        earned[-1] -= args.overlong_penalty * min(max(beyond / args.overlong_buffer, 0.0), 1.0)
    return {
        "old": old,
        "weights": weights,
        "trained": trained,
        "trained_kl": trained_kl,
        "response": response,
        "earned": earned,
        "values": list(per_token["values"]),
        "ended": ended,
        "reference": reference,
        "kl_weight": args.kl_ctl if args.kl_in == "loss" else 0.0,
    }


def _behaviour_weights(args, differences, trained):
    """Each token's own, or the product or geometric mean over the trained tokens of a response."""
    if args.behav_imp_weight_level == "token":
        return [math.exp(difference) for difference in differences]
    total = sum(
        difference for difference, counts in zip(differences, trained, strict=True) if counts
    )
    count = sum(trained) if args.behav_imp_weight_level == "geometric" else 1
    return [math.exp(total / max(count, 1))] * len(differences)


def _kl(estimator, difference):
    """Of the policy from the reference, given the difference of their log-probs at what the policy
    sampled."""
    ratio = math.exp(-difference)  # reference over policy
    return {
        "k1": -math.log(ratio),
        "k2": math.log(ratio) ** 2 / 2,
        "k3": ratio - 1 - math.log(ratio),
    }[estimator]


def _normalised(args, sequences):
    if not args.adv_norm:
        return sequences
    by_group = getattr(args, "group_adv_norm", False)
    for group in {sequence["sample"] if by_group else 0 for sequence in sequences}:
        members = [
            sequence for sequence in sequences if not by_group or sequence["sample"] == group
        ]
        trained = [
            advantage
            for sequence in members
            for advantage, is_trained in zip(
                sequence["advantages"], sequence["trained"], strict=True
            )
            if is_trained
        ]
        if trained:
            mean, spread = statistics.fmean(trained), statistics.pstdev(trained)
            for sequence in members:
                sequence["advantages"] = [
                    (a - mean) / (spread + 1e-5) for a in sequence["advantages"]
                ]
    return sequences


def policy_loss_by_hand(policy, sequences, model):
    """(sum over tokens or responses of the loss, with its gradient; what it is divided by), in
    float64, with the settings of `ppo_actor`."""
    loss, count = torch.zeros((), dtype=torch.float64), 0
    is_spread = policy.policy_loss == "sequence" != policy.loss_aggregation
    for sequence in sequences:
        output = TinyOutput(model, sequence["tokens"], [len(sequence["tokens"])])
        output.temperature = policy.generation.temperature
        scores = output.logits.log_softmax(-1)
        trained = [t for t, is_trained in enumerate(sequence["trained"]) if is_trained]
        logprobs = {t: scores[t, sequence["tokens"][t + 1]] for t in trained}
        log_ratios = _log_ratios(policy, {t: logprobs[t] - sequence["old"][t] for t in trained})
        terms = [
            sequence["weights"][t]
            * _surrogate(
                policy,
                sequence["advantages"][t],
                log_ratios[t].exp(),
                logprobs[t],
                sequence["old"][t],
            )
            / (len(trained) if is_spread else 1)
            - policy.entropy_coef * -(scores[t].exp() * scores[t]).sum()
            + sequence["kl_weight"]
            * (1.0 if policy.kl_gradient == "naive" else sequence["weights"][t])
            * _kl_in_loss(policy, logprobs[t], sequence["old"][t], sequence["reference"][t])
            for t in trained
        ]
        if terms:
            share = {"token": 1, "sequence": len(terms), "constant": policy.loss_constant}[
                policy.loss_aggregation
            ]
            loss = loss + torch.stack(terms).sum() / share
        counted = {"token": len(terms), "sequence": bool(terms), "constant": 1}
        count += counted[policy.loss_aggregation]
    return loss, count


def _log_ratios(policy, by_token):
    """Each token's own, or that of its response."""
    if not by_token or policy.policy_loss not in ("gspo", "sequence"):
        return by_token
    together = torch.stack(list(by_token.values()))
    return dict.fromkeys(
        by_token, together.mean() if policy.policy_loss == "gspo" else together.sum()
    )


def _surrogate(policy, advantage, ratio, logprob, old):
    if policy.policy_loss == "sapo":
        return -advantage * _gate(policy, advantage, ratio)
    if policy.policy_loss in ("dppo_tv", "dppo_kl"):
        return -advantage * ratio * _within(policy, advantage, float(logprob.detach()), old)
    high = policy.eps_clip if policy.eps_clip_high is None else policy.eps_clip_high
    inside = ratio.clamp(1 - policy.eps_clip, 1 + high)
    if policy.policy_loss == "cispo":
        return -inside.detach() * advantage * logprob
    objective = torch.minimum(ratio * advantage, inside * advantage)
    if policy.c_clip is not None and advantage < 0:
        objective = torch.maximum(
            objective, torch.tensor(policy.c_clip * advantage, dtype=torch.float64)
        )
    return -objective


def _gate(policy, advantage, ratio):
    """What SAPO trains on instead of the ratio."""
    tau = (policy.tau_pos or 1.0) if advantage > 0 else (policy.tau_neg or 1.05)
    return 4 / tau / (1 + (-tau * (ratio - 1)).exp())


def _within(policy, advantage, logprob, old):
    """Whether DPPO trains on a token, by the probabilities of choosing it."""
    p, q = math.exp(logprob), math.exp(old)
    distance = abs(p - q)
    if policy.policy_loss == "dppo_kl":
        distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if advantage > 0:
        high = policy.eps_clip if policy.eps_clip_high is None else policy.eps_clip_high
        return p < q or distance <= high
    return p > q or distance <= policy.eps_clip


def _kl_in_loss(policy, logprob, old, reference):
    """The estimator, weighted by the ratio; with the gradient of the reverse KL, (log-prob -
    reference) times that of the log-prob."""
    difference = logprob - reference
    fixed = difference.detach()
    if policy.kl_gradient == "naive":
        estimates = {
            "k1": difference,
            "k2": difference**2 / 2,
            "k3": (-difference).exp() - 1 + difference,
        }
        return estimates[policy.kl_estimator]
    ratio = math.exp(float(logprob.detach()) - old)
    return ratio * (_kl(policy.kl_estimator, float(fixed)) + fixed * (difference - fixed))
