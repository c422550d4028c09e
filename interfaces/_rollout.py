"""Turns a finished rollout into training data: KL, token rewards, advantages, returns.

Each function takes only the part of the settings that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import AGE
from rlcli.api.model import Model
from rlcli.errors import UsageError
from rlcli.ops.advantages import Trajectories
from rlcli.ops.kl import kl_estimate, kl_of_policy
from rlcli.ops.packing import action_owner
from rlcli.ops.policy_losses import behaviour_weights
from rlcli.ops.reduce import AllReduce, identity
from rlcli.ops.rewards import action_mask, dense_rewards, overlong_penalties, shape_scores, token_rewards

from ._best_of import keep_best
from ._rollout_settings import Advantages, KLPenalty, RewardShaping, RolloutSettings
from ._settings import OldPolicy

PER_ACTION = ("loss_mask", "response_mask", "old_logprobs", "loss_weights", "kl", "advantages", "returns")


def prepare(settings: RolloutSettings, data: SequenceSample, kl_coef: float, all_reduce: AllReduce) -> SequenceSample:
    """The sequences to train on; `kl_coef` is the weight of the KL penalty in the reward.

    They have these keys in addition to `packed_input_ids` (A = T - N actions):

    `response_mask` [A] actions of the response; `loss_mask` [A] actions that are trained on; `old_logprobs`
    [A]; `kl` [A] of the trained policy from the reference as far as it is known (`knows_trained_policy`), 0 outside the
    response; `advantages` [A] and `returns` [A]; `values` [T]; `loss_weights` [A] of the decoupled loss (else 1); per
    sequence `rewards`, `shaped_rewards`, `seq_no_eos_mask` and `ages` (int64, in steps). With a KL penalty also
    `ref_logprobs` [A].
    """
    if settings.generation_size is not None:
        _need(data.data, "rewards")
        data = keep_best(data, settings.generation.responses_per_prompt)
    tensors, lengths = data.data, data.flat_seqlens("packed_input_ids")
    response = action_mask(_need(tensors, "prompt_mask"), lengths)
    no_eos = _need(tensors, "seq_no_eos_mask")
    trained = response & ~no_eos[action_owner(lengths, no_eos.device)] if settings.mask_too_long else response
    sampler, old, weights, trained = _policies(settings, tensors, trained)
    penalty = _penalty(settings, tensors, sampler, response)
    scores, rewards = _rewards(settings, tensors, lengths, penalty, response, kl_coef)
    values = _values(settings, tensors, lengths)
    trajectories = Trajectories(rewards, values, response, lengths, _groups(data).to(response.device), no_eos)
    advantages, returns = settings.estimate(trajectories, all_reduce)
    advantages = settings.normalized(advantages, trajectories, trained, all_reduce)
    kl = _kl(settings, tensors, response)
    per_action = dict(zip(PER_ACTION, (trained, response, old, weights, kl, advantages, returns), strict=True))
    if settings.kl_ctl:
        per_action["ref_logprobs"] = tensors["packed_ref_logprobs"]
    per_sequence = {
        "rewards": tensors.get("rewards", scores),
        "shaped_rewards": scores,
        "seq_no_eos_mask": no_eos,
        "ages": _ages(data).to(response.device),
    }
    return _batch(data, per_action, per_sequence, values)


def batch_stats(settings: RolloutSettings, batch: SequenceSample, all_reduce: AllReduce) -> dict[str, float]:
    """Stats of the batch that `prepare` made: means over the responses, or the tokens, of all ranks."""
    tensors = batch.data
    responses, tokens = len(tensors["rewards"]), int(tensors["response_mask"].sum())
    advantages = _response_means(batch, tensors["advantages"])
    pairs = {
        "shaped_reward": (tensors["shaped_rewards"].double().sum(), responses),
        "response_length": (tensors["response_mask"].sum(), responses),
        "no_eos_fraction": (tensors["seq_no_eos_mask"].sum(), responses),
        "advantage": (advantages.sum(), len(advantages)),
        "advantage_abs": (_response_means(batch, tensors["advantages"].abs()).sum(), len(advantages)),
    }
    if settings.kl_ctl and knows_trained_policy(settings, batch, all_reduce):
        pairs["kl"] = (tensors["kl"].double().sum(), tokens)
    if not settings.use_dense_reward:
        scaled = (tensors["rewards"].double() - settings.reward_output_bias) * settings.reward_output_scaling
        pairs["reward_clip_fraction"] = ((scaled.abs() > settings.max_reward_clip).sum(), responses)
    return means(pairs, all_reduce)


def _response_means(batch: SequenceSample, per_action: torch.Tensor) -> torch.Tensor:
    """The mean over the trained actions of each response that has some, float64."""
    mask, lengths = batch.data["loss_mask"], batch.flat_seqlens("packed_input_ids")
    owner = action_owner(lengths, mask.device)[mask]
    counts = torch.bincount(owner, minlength=len(lengths))
    sums = torch.zeros(len(lengths), dtype=torch.float64, device=mask.device)
    sums = sums.index_add(0, owner, per_action[mask].double())
    return sums[counts > 0] / counts[counts > 0]


def knows_trained_policy(settings: OldPolicy, batch: SequenceSample, all_reduce: AllReduce) -> bool:
    """Whether the log-probs of the policy as the step begins are known for the whole batch: the trainer has computed
    them, or they are the sampler's, because no sample is older than the step. Otherwise the first optimizer step gives
    those of its part (`_policy_loss.at_first`)."""
    older = (batch.data["ages"] > 0).sum().double().reshape(1)
    return settings.uses_proximal_logprobs or not float(all_reduce(older.cpu()))


def equal_groups(batch: SequenceSample, all_reduce: AllReduce) -> dict[str, float]:
    """`equal_rewards_fraction`: the share of prompts whose responses all got the same reward, over all ranks."""
    groups = batch.data["shaped_rewards"].split([len(lengths) for lengths in batch.seqlens["packed_input_ids"]])
    alike = torch.tensor(sum(bool((group == group[:1]).all()) for group in groups))
    return means({"equal_rewards_fraction": (alike, len(groups))}, all_reduce)


def proximal_gaps(settings: OldPolicy, data: SequenceSample, all_reduce: AllReduce) -> dict[str, float]:
    """`gaps_by_age` of the log-probs that the trainer computed before the step, over the actions of all responses.
    Where it has computed none, the first optimizer step reports them (`_policy_loss.at_first`)."""
    tensors = data.data
    if not settings.uses_proximal_logprobs:
        return {}
    lengths = data.flat_seqlens("packed_input_ids")
    response = action_mask(_need(tensors, "prompt_mask"), lengths)
    gaps = (tensors["proximal_logprobs"] - tensors["packed_logprobs"]).double().abs()[response]
    ages = _ages(data).to(response.device)[action_owner(lengths, response.device)][response]
    return counted_means(gaps_by_age(gaps, ages), all_reduce)


def gaps_by_age(gaps: torch.Tensor, ages: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Sum and number of the distances [n] between the trainer's and the sampler's log-probs, in nats: `sampler_gap` of
    samples of age 0, where both have the same weights; `policy_drift` of older ones, whose weights have been trained
    since."""
    same = ages == 0
    return {
        name: (gaps[members].sum(), members.count_nonzero())
        for name, members in (("sampler_gap", same), ("policy_drift", ~same))
    }


def reduce_over(model: Model) -> AllReduce:
    """Sums over the ranks of a role; a role without an engine has only one."""
    engine = model.module
    if engine is None:
        return identity
    return lambda value: engine.all_reduce(value.to(engine.device), "sum").to(value.device)


Sums = Mapping[str, tuple[torch.Tensor, "torch.Tensor | int"]]
"""Name → the sum of some numbers on this rank, and how many there are."""


def means(sums: Sums, all_reduce: AllReduce) -> dict[str, float]:
    """The mean of each over all ranks; 0 where nothing was counted."""
    return {name: total / max(count, 1.0) for name, (total, count) in _reduced(sums, all_reduce).items()}


def counted_means(sums: Sums, all_reduce: AllReduce) -> dict[str, float]:
    """The mean of each over all ranks, without those of which nothing was counted."""
    return {name: total / count for name, (total, count) in _reduced(sums, all_reduce).items() if count}


def _reduced(sums: Sums, all_reduce: AllReduce) -> dict[str, tuple[float, float]]:
    totals = torch.stack([total.detach().to("cpu", torch.float64) for total, _ in sums.values()])
    counts = torch.tensor([int(count) for _, count in sums.values()], dtype=torch.float64)
    table = all_reduce(torch.stack([totals, counts])).tolist()
    return dict(zip(sums, zip(*table, strict=True), strict=True))


def response_kl(batch: SequenceSample, all_reduce: AllReduce) -> tuple[float, int]:
    """(KL of the trained policy from the reference per response in nats, responses), over all ranks: the input of a KL
    controller."""
    responses = len(batch.flat_seqlens("packed_input_ids"))
    total = batch.data["kl"].to(torch.float64).sum()
    table = all_reduce(torch.stack([total, torch.full_like(total, responses)]))
    return float(table[0] / table[1].clamp(min=1)), int(table[1])


def _need(tensors: Mapping[str, torch.Tensor], key: str, otherwise: str = "") -> torch.Tensor:
    if key not in tensors:
        hint = f"add {key} to the call's inputs" + (f", {otherwise}" if otherwise else "")
        raise UsageError(f"training needs the key {key}, which the call does not receive", hint=hint, code="R61")
    return tensors[key]


def _policies(
    settings: OldPolicy, tensors: Mapping[str, torch.Tensor], trained: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs of the sampling policy, log-probs the ratio is taken to, weight of each action, actions still trained
    on).

    The KL penalty is that of the sampling policy, because the estimators of `rlcli.ops.kl` are expectations over its
    samples: with another policy's log-probs they do not estimate a KL at all. `recompute_logprob` uses the trainer's
    numbers for that policy, everywhere; `use_decoupled_loss` keeps the sampler's, and uses the proximal policy only in
    the loss. AReaL does the same.
    """
    behaviour = _need(tensors, "packed_logprobs")
    ones = torch.ones_like(behaviour)
    if not settings.uses_proximal_logprobs:
        return behaviour, behaviour, ones, trained
    proximal = _need(tensors, "proximal_logprobs", "or turn use_decoupled_loss and recompute_logprob off")
    if not settings.use_decoupled_loss:
        return proximal, proximal, ones, trained
    cap, mode = settings.behav_imp_weight_cap, settings.behav_imp_weight_mode
    weights, trained = behaviour_weights(proximal, behaviour, trained, cap, mode)
    return behaviour, proximal, weights, trained


def _penalty(
    settings: KLPenalty, tensors: Mapping[str, torch.Tensor], sampler: torch.Tensor, response: torch.Tensor
) -> torch.Tensor:
    """[A] KL of the sampling policy from the reference, 0 outside the response."""
    if not settings.kl_ctl:
        return torch.zeros_like(sampler)
    reference = _need(tensors, "packed_ref_logprobs", "or set kl_ctl: 0")
    return torch.where(response, kl_estimate(sampler, reference, settings.kl_estimator), 0.0)


def _kl(settings: RolloutSettings, tensors: Mapping[str, torch.Tensor], response: torch.Tensor) -> torch.Tensor:
    """[A] KL of the trained policy from the reference, 0 outside the response. Where nobody has computed its log-probs,
    the sampler's stand for them."""
    if not settings.kl_ctl:
        return torch.zeros_like(response, dtype=torch.float32)
    sampled, reference = tensors["packed_logprobs"], tensors["packed_ref_logprobs"]
    trained = tensors["proximal_logprobs"] if settings.uses_proximal_logprobs else sampled
    return torch.where(response, kl_of_policy(trained, sampled, reference), 0.0)


def _ages(data: SequenceSample) -> torch.Tensor:
    """[N] int64: the age of each sequence in steps (`rlcli.api.key_meaning.AGE`)."""
    ages = data.metadata.get(AGE) or [0] * data.bs
    sizes = [len(lengths) for lengths in data.seqlens["packed_input_ids"]]
    return torch.repeat_interleave(torch.tensor(ages, dtype=torch.int64), torch.tensor(sizes, dtype=torch.int64))


def _rewards(
    settings: RolloutSettings, tensors: Mapping[str, torch.Tensor], lengths: list[int], kl: torch.Tensor,
    response: torch.Tensor, kl_coef: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(shaped score of each sequence, reward of each action)."""
    dense = None
    if settings.use_dense_reward:
        state_scores = _need(tensors, "dense_rewards", "or set use_dense_reward: false")
        scaling, clip = settings.reward_output_scaling, settings.max_reward_clip
        dense = dense_rewards(state_scores, lengths, settings.reward_delta, scaling, clip)
        scores = torch.zeros(len(lengths), device=dense.device)
    else:
        scores = _shaped(settings, _need(tensors, "rewards"), tensors["seq_no_eos_mask"])
    if settings.overlong_buffer is not None:
        owner = action_owner(lengths, response.device)[response]
        tokens = torch.bincount(owner, minlength=len(lengths))
        beyond = overlong_penalties(tokens, settings.generation.max_new_tokens, settings.overlong_buffer)
        scores = scores + settings.overlong_penalty * beyond.to(scores)
    return scores, token_rewards(scores, kl, response, lengths, kl_coef, dense)


def _shaped(settings: RewardShaping, rewards: torch.Tensor, no_eos: torch.Tensor) -> torch.Tensor:
    return shape_scores(
        rewards, no_eos, scaling=settings.reward_output_scaling, bias=settings.reward_output_bias,
        clip=settings.max_reward_clip, mask_no_eos_with_zero=settings.mask_no_eos_with_zero,
    )  # fmt: skip


def _values(settings: Advantages, tensors: Mapping[str, torch.Tensor], lengths: list[int]) -> torch.Tensor:
    if not settings.needs_values:
        return torch.zeros(sum(lengths), device=tensors["packed_input_ids"].device)
    return _need(tensors, "values", "or set disable_value: true")


def _groups(data: SequenceSample) -> torch.Tensor:
    """[N] the index, in the batch, of the sample that each sequence belongs to."""
    sizes = torch.tensor([len(lengths) for lengths in data.seqlens["packed_input_ids"]], dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(data.bs), sizes)


def _batch(
    data: SequenceSample,
    per_action: dict[str, torch.Tensor],
    per_sequence: dict[str, torch.Tensor],
    values: torch.Tensor,
) -> SequenceSample:
    tokens = data.seqlens["packed_input_ids"]
    seqlens = {"packed_input_ids": tokens, "values": tokens}
    seqlens |= {key: [[n - 1 for n in lengths] for lengths in tokens] for key in per_action}
    seqlens |= {key: [[1] * len(lengths) for lengths in tokens] for key in per_sequence}
    tensors = {
        "packed_input_ids": data.data["packed_input_ids"],
        "values": values,
        **per_action,
        **per_sequence,
    }
    return SequenceSample.from_default(ids=data.ids, seqlens=seqlens, data=tensors, metadata=data.metadata)
