"""A rollout over the tiny engine's vocabulary, and policy gradients written out by hand to compare with."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

from rlcli.testing.batches import KEYS, DigitTokenizer, make_batch
from rlcli.testing.tiny_engine import TinyOutput


@pytest.fixture
def rollout():
    """Eight samples of two responses each, of different lengths, with every key that PPO reads."""
    return make_batch([key for key in KEYS if key != "packed_prompts"])


@pytest.fixture
def tokenizer():
    return DigitTokenizer()


@pytest.fixture
def sampled_by():
    """The function that gives a batch the log-probs of a model, with noise of the size `spread`."""

    def sampled(model, batch, spread=0.0):
        lengths = batch.flat_seqlens("packed_input_ids")
        logprobs = TinyOutput(model.module.model, batch.data["packed_input_ids"], lengths).logprobs.detach().float()
        generator = torch.Generator().manual_seed(7)
        for key in ("packed_logprobs", "proximal_logprobs", "packed_ref_logprobs"):
            batch.data[key] = logprobs + spread * torch.randn(logprobs.shape, generator=generator)
        return batch

    return sampled


@pytest.fixture
def by_hand():
    return rollout_by_hand


@pytest.fixture
def loss_by_hand():
    return policy_loss_by_hand


def rollout_by_hand(args, batch, kl_coef):
    """The training data: for each sequence a dict of lists over its actions. One number at a time, in plain floats.
    `kl_coef` is the weight of the KL penalty in the reward."""
    column = {key: batch.data[key].double().tolist() for key in batch.keys}
    sequences, token, action, number = [], 0, 0, 0
    for sample, lengths in enumerate(batch.seqlens["packed_input_ids"]):
        for length in lengths:
            sequence = {"sample": sample, "tokens": batch.data["packed_input_ids"][token : token + length]}
            per_token = {key: column[key][token : token + length] for key in ("prompt_mask", "values", "dense_rewards")}
            per_action = {
                key: column[key][action : action + length - 1]
                for key in ("packed_logprobs", "proximal_logprobs", "packed_ref_logprobs")
            }
            ended = not column["seq_no_eos_mask"][number]
            sequence |= _sequence(args, kl_coef, length, per_token, per_action, column["rewards"][number], ended)
            sequences.append(sequence)
            token, action, number = token + length, action + length - 1, number + 1
    return _normalised(args, _compared(args, sequences) if hasattr(args, "baseline") else _valued(args, sequences))


def _compared(args, sequences):
    """Advantages of each response relative to other responses."""
    everybody = [sum(sequence["earned"]) for sequence in sequences]
    for response in sequences:
        members = [sequence for sequence in sequences if sequence["sample"] == response["sample"]]
        group = [sum(sequence["earned"]) for sequence in members]
        others = [sum(sequence["earned"]) for sequence in members if sequence is not response]
        baseline = {
            "group": statistics.fmean(group), "leave_one_out": statistics.fmean(others),
            "batch": statistics.fmean(everybody), "none": 0.0,
        }[args.baseline]  # fmt: skip
        scale = {"group": statistics.stdev(group) + 1e-6, "batch": statistics.stdev(everybody) + 1e-6, "none": 1.0}
        earned, is_action = response["earned"], response["response"]
        actions = range(len(earned))
        to_go = args.credit == "to_go"
        credits = [sum(earned[t if to_go else 0 :]) * is_action[t] for t in actions]
        response["returns"] = credits
        response["advantages"] = [(credits[t] - baseline) / scale[args.scale] * is_action[t] for t in actions]
    return sequences


def _valued(args, sequences):
    """Advantages of each action by the values of a critic."""
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
        sequence["returns"] = [advantage + value for advantage, value in zip(advantages, values[:-1], strict=True)]
    return sequences


def _sequence(args, kl_coef, length, per_token, per_action, reward, ended):
    actions = range(length - 1)
    response = [not per_token["prompt_mask"][t + 1] for t in actions]
    behaviour, proximal = per_action["packed_logprobs"], per_action["proximal_logprobs"]
    old = proximal if args.use_decoupled_loss or args.recompute_logprob else behaviour
    weights = [math.exp(proximal[t] - behaviour[t]) if args.use_decoupled_loss else 1.0 for t in actions]
    trained = [response[t] and (ended or not args.mask_too_long) for t in actions]
    if args.behav_imp_weight_mode == "truncate":
        weights = [min(weight, args.behav_imp_weight_cap) for weight in weights]
    elif args.behav_imp_weight_cap is not None:
        trained = [trained[t] and weights[t] <= args.behav_imp_weight_cap for t in actions]
    sampler = proximal if args.recompute_logprob and not args.use_decoupled_loss else behaviour
    kl = [_kl(args.kl_estimator, sampler[t] - per_action["packed_ref_logprobs"][t]) * response[t] for t in actions]
    trained_kl = [
        math.exp(old[t] - behaviour[t]) * _kl("k3", old[t] - per_action["packed_ref_logprobs"][t]) * response[t]
        for t in actions
    ]
    earned = [-kl_coef * kl[t] if args.kl_ctl else 0.0 for t in actions]
    limit = args.max_reward_clip
    if args.use_dense_reward:
        for t in actions:
            if response[t]:
                score = per_token["dense_rewards"][t + 1] - (per_token["dense_rewards"][t] if args.reward_delta else 0)
                earned[t] += min(max(score * args.reward_output_scaling, -limit), limit)
    elif length > 1 and response[-1]:
        score = (reward - args.reward_output_bias) * args.reward_output_scaling
        cut = args.mask_no_eos_with_zero and not ended
        earned[-1] += 0.0 if cut else min(max(score, -limit), limit)
    if args.overlong_buffer is not None and response and response[-1]:
        beyond = sum(response) - (args.generation.max_new_tokens - args.overlong_buffer)
        earned[-1] -= args.overlong_penalty * min(max(beyond / args.overlong_buffer, 0.0), 1.0)
    return {
        "old": old, "weights": weights, "trained": trained, "trained_kl": trained_kl, "response": response,
        "earned": earned, "values": list(per_token["values"]), "ended": ended,
        "reference": per_action["packed_ref_logprobs"],
    }  # fmt: skip


def _kl(estimator, difference):
    """Of the policy from the reference, given the difference of their log-probs at what the policy sampled."""
    ratio = math.exp(-difference)  # reference over policy
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[estimator]


def _normalised(args, sequences):
    if not args.adv_norm:
        return sequences
    by_group = getattr(args, "group_adv_norm", False)
    for group in {sequence["sample"] if by_group else 0 for sequence in sequences}:
        members = [sequence for sequence in sequences if not by_group or sequence["sample"] == group]
        pairs = [zip(sequence["advantages"], sequence["trained"], strict=True) for sequence in members]
        trained = [advantage for advantage, trains in itertools.chain(*pairs) if trains]
        if trained:
            mean, spread = statistics.fmean(trained), statistics.pstdev(trained)
            for sequence in members:
                sequence["advantages"] = [(a - mean) / (spread + 1e-5) for a in sequence["advantages"]]
    return sequences


def policy_loss_by_hand(args, sequences, model):
    """(sum over tokens or responses of the loss, with its gradient; what it is divided by), in float64."""
    loss, count = torch.zeros((), dtype=torch.float64), 0
    for sequence in sequences:
        output = TinyOutput(model, sequence["tokens"], [len(sequence["tokens"])])
        output.temperature = args.generation.temperature
        scores = output.logits.log_softmax(-1)
        places = [t for t, trains in enumerate(sequence["trained"]) if trains]
        logprobs = {t: scores[t, sequence["tokens"][t + 1]] for t in places}
        by_token = {t: logprobs[t] - sequence["old"][t] for t in places}
        log_ratios = _log_ratios(args, by_token)
        terms = [
            sequence["weights"][t]
            * _surrogate(args, sequence["advantages"][t], log_ratios[t].exp(), logprobs[t])
            / (len(places) if args.policy_loss == "sequence" else 1)
            - args.entropy_coef * -(scores[t].exp() * scores[t]).sum()
            + _kl_in_loss(args, logprobs[t] - sequence["reference"][t], float(by_token[t].detach()))
            for t in places
        ]
        if terms:
            share = {"token": 1, "sequence": len(terms), "constant": args.loss_constant}[args.loss_aggregation]
            loss = loss + torch.stack(terms).sum() / share
        counted = {"token": len(terms), "sequence": bool(terms), "constant": 1}
        count += counted[args.loss_aggregation]
    return loss, count


def _log_ratios(args, by_token):
    """The log-ratio of each token, or of its response."""
    if not by_token or args.policy_loss in ("ppo", "cispo"):
        return by_token
    together = torch.stack(list(by_token.values()))
    return dict.fromkeys(by_token, together.mean() if args.policy_loss == "gspo" else together.sum())


def _surrogate(args, advantage, ratio, logprob):
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    inside = ratio.clamp(1 - args.eps_clip, 1 + high)
    if args.policy_loss == "cispo":
        return -inside.detach() * advantage * logprob
    objective = torch.minimum(ratio * advantage, inside * advantage)
    if args.c_clip is not None and advantage < 0:
        objective = torch.maximum(objective, torch.tensor(args.c_clip * advantage, dtype=torch.float64))
    return -objective


def _kl_in_loss(args, difference, log_ratio):
    """The estimator, weighted by the ratio; with the gradient of the reverse KL, (log-prob - reference) times that of
    the log-prob."""
    if getattr(args, "kl_in", "reward") == "reward" or not args.kl_ctl:
        return 0.0
    fixed = difference.detach()
    if args.kl_gradient == "naive":
        value = {"k1": difference, "k2": difference**2 / 2, "k3": (-difference).exp() - 1 + difference}
        return args.kl_ctl * value[args.kl_estimator]
    return args.kl_ctl * math.exp(log_ratio) * (_kl(args.kl_estimator, float(fixed)) + fixed * (difference - fixed))
