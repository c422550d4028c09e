"""A rollout over the tiny engine's vocabulary, and PPO written out by hand to compare with."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from rlcli.testing.batches import KEYS, DigitTokenizer, make_batch
from rlcli.testing.tiny_engine import TinyOutput


@pytest.fixture
def rollout():
    """Eight samples of two responses each, of different lengths, with all that PPO can be told of them."""
    return make_batch([key for key in KEYS if key != "packed_prompts"])


@pytest.fixture
def tokenizer():
    return DigitTokenizer()


@pytest.fixture
def sampled_by():
    """The function that gives a batch the log-probs of a model, or others that far from them."""

    def sampled(model, batch, spread=0.0):
        lengths = batch.flat_seqlens("packed_input_ids")
        own = TinyOutput(model.module.model, batch.data["packed_input_ids"], lengths).logprobs.detach().float()
        generator = torch.Generator().manual_seed(7)
        for key in ("packed_logprobs", "proximal_logprobs", "packed_ref_logprobs"):
            batch.data[key] = own + spread * torch.randn(own.shape, generator=generator)
        return batch

    return sampled


@pytest.fixture
def by_hand():
    return rollout_by_hand


def rollout_by_hand(args, batch, kl_coef):
    """What PPO trains on: for each sequence a dict of lists over its actions. One number at a time, in plain floats."""
    column = {key: batch.data[key].double().tolist() for key in batch.keys}
    sequences, token, action, number = [], 0, 0, 0
    for sample, lengths in enumerate(batch.seqlens["packed_input_ids"]):
        for length in lengths:
            one = {"sample": sample, "tokens": batch.data["packed_input_ids"][token : token + length]}
            per_token = {key: column[key][token : token + length] for key in ("prompt_mask", "values", "dense_rewards")}
            per_action = {
                key: column[key][action : action + length - 1]
                for key in ("packed_logprobs", "proximal_logprobs", "packed_ref_logprobs")
            }
            ended = not column["seq_no_eos_mask"][number]
            one |= _sequence(args, kl_coef, length, per_token, per_action, column["rewards"][number], ended)
            sequences.append(one)
            token, action, number = token + length, action + length - 1, number + 1
    return _normalised(args, _compared(sequences) if args.advantage_estimator == "grpo" else sequences)


def _compared(sequences):
    """Each response by what it earned in all, against the others to its prompt."""
    for one in sequences:
        group = [sum(other["earned"]) for other in sequences if other["sample"] == one["sample"]]
        relative = (sum(one["earned"]) - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
        one["advantages"] = [relative * acts for acts in one["response"]]
        one["returns"] = [sum(one["earned"]) * acts for acts in one["response"]]
    return sequences


def _sequence(args, kl_coef, length, per_token, per_action, reward, ended):
    actions = range(length - 1)
    response = [not per_token["prompt_mask"][t + 1] for t in actions]
    behaviour, proximal = per_action["packed_logprobs"], per_action["proximal_logprobs"]
    old = proximal if args.use_decoupled_loss or args.recompute_logprob else behaviour
    weights = [math.exp(proximal[t] - behaviour[t]) if args.use_decoupled_loss else 1.0 for t in actions]
    trained = [response[t] and (ended or not args.mask_too_long) for t in actions]
    if args.behav_imp_weight_cap is not None:
        trained = [trained[t] and weights[t] <= args.behav_imp_weight_cap for t in actions]
    sampler = proximal if args.recompute_logprob and not args.use_decoupled_loss else behaviour
    kl = [_kl(args.kl_estimator, sampler[t] - per_action["packed_ref_logprobs"][t]) * response[t] for t in actions]
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
    values = [0.0] * length if args.disable_value else list(per_token["values"])
    if ended or not args.bootstrap_no_eos:
        values[-1] = 0.0
    advantages, running = [0.0] * (length - 1), 0.0
    for t in reversed(actions):
        running = earned[t] + args.discount * values[t + 1] - values[t] + args.discount * args.gae_lambda * running
        advantages[t] = running
    returns = [advantages[t] + values[t] for t in actions]
    return {
        "old": old, "weights": weights, "trained": trained, "kl": kl, "advantages": advantages, "returns": returns,
        "values": values, "response": response, "earned": earned,
    }  # fmt: skip


def _kl(estimator, difference):
    """Of the policy from the reference, given the difference of their log-probs at what the policy sampled."""
    ratio = math.exp(-difference)  # reference over policy
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[estimator]


def _normalised(args, sequences):
    if not args.adv_norm:
        return sequences
    for group in {one["sample"] if args.group_adv_norm else 0 for one in sequences}:
        members = [one for one in sequences if not args.group_adv_norm or one["sample"] == group]
        kept = [a for one in members for a, trains in zip(one["advantages"], one["trained"], strict=True) if trains]
        if kept:
            mean, spread = statistics.fmean(kept), statistics.pstdev(kept)
            for one in members:
                one["advantages"] = [(a - mean) / (spread + 1e-5) for a in one["advantages"]]
    return sequences
