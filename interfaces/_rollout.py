"""Turns a finished rollout into training data: KL, token rewards, advantages, returns.

Each function takes only the part of the settings that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import Model
from rlcli.errors import UsageError
from rlcli.ops.advantages import Trajectories
from rlcli.ops.kl import kl_estimate
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
    [A]; `kl` [A] from the reference, 0 outside the response; `advantages` [A] and `returns` [A]; `values` [T];
    `loss_weights` [A] of the decoupled loss (else 1); per sequence `rewards`, `shaped_rewards`,
    `seq_no_eos_mask`. With a KL penalty also `ref_logprobs` [A].
    """
    if settings.generation_size is not None:
        _need(data.data, "rewards")
        data = keep_best(data, settings.generation.responses_per_prompt)
    tensors, lengths = data.data, data.flat_seqlens("packed_input_ids")
    response = action_mask(_need(tensors, "prompt_mask"), lengths)
    no_eos = _need(tensors, "seq_no_eos_mask")
    trained = response & ~no_eos[action_owner(lengths, no_eos.device)] if settings.mask_too_long else response
    sampler, old, weights, trained = _policies(settings, tensors, trained)
    kl = _penalty(settings, tensors, sampler, response)
    scores, rewards = _rewards(settings, tensors, lengths, kl, response, kl_coef)
    values = _values(settings, tensors, lengths)
    trajectories = Trajectories(rewards, values, response, lengths, _groups(data).to(response.device), no_eos)
    advantages, returns = settings.estimate(trajectories, all_reduce)
    advantages = settings.normalized(advantages, trajectories, trained, all_reduce)
    per_action = dict(zip(PER_ACTION, (trained, response, old, weights, kl, advantages, returns), strict=True))
    if settings.kl_ctl:
        per_action["ref_logprobs"] = tensors["packed_ref_logprobs"]
    per_sequence = {
        "rewards": tensors.get("rewards", scores),
        "shaped_rewards": scores,
        "seq_no_eos_mask": no_eos,
    }
    return _batch(data, per_action, per_sequence, values)


def batch_stats(
    settings: RewardShaping, batch: SequenceSample, data: SequenceSample, all_reduce: AllReduce
) -> dict[str, float]:
    """Stats of the batch that `prepare` made from `data`: means over the responses, or the tokens, of all ranks."""
    tensors = batch.data
    responses, trained = len(tensors["rewards"]), int(tensors["loss_mask"].sum())
    tokens = int(tensors["response_mask"].sum())
    advantages = tensors["advantages"][tensors["loss_mask"]].double()
    pairs = {
        "reward": (tensors["rewards"].double().sum(), responses),
        "shaped_reward": (tensors["shaped_rewards"].double().sum(), responses),
        "kl": (tensors["kl"].double().sum(), tokens),
        "response_length": (tensors["response_mask"].sum(), responses),
        "no_eos_fraction": (tensors["seq_no_eos_mask"].sum(), responses),
        "advantage": (advantages.sum(), trained),
        "advantage_abs": (advantages.abs().sum(), trained),
        "return": (tensors["returns"][tensors["loss_mask"]].double().sum(), trained),
    }
    if not settings.use_dense_reward:
        scaled = (tensors["rewards"].double() - settings.reward_output_bias) * settings.reward_output_scaling
        pairs["reward_clip_fraction"] = ((scaled.abs() > settings.max_reward_clip).sum(), responses)
    if "solved" in data.keys:
        pairs["solved"] = (data.data["solved"].sum(), len(data.data["solved"]))
    return means(pairs, all_reduce)


def equal_groups(batch: SequenceSample, all_reduce: AllReduce) -> dict[str, float]:
    """`equal_rewards_fraction`: the share of prompts whose responses all got the same reward, over all ranks."""
    groups = batch.data["shaped_rewards"].split([len(lengths) for lengths in batch.seqlens["packed_input_ids"]])
    alike = torch.tensor(sum(bool((group == group[:1]).all()) for group in groups))
    return means({"equal_rewards_fraction": (alike, len(groups))}, all_reduce)


def sampler_gap(settings: OldPolicy, data: SequenceSample, all_reduce: AllReduce) -> dict[str, float]:
    """`sampler_gap`: the gap between the trainer's and the sampler's log-probs before training: the mean absolute
    difference over the actions of responses, in nats. Where the trainer has computed no log-probs, those of its first
    optimizer step are used (`_policy_loss.policy_losses`)."""
    tensors = data.data
    if not settings.uses_proximal_logprobs:
        return {}
    response = action_mask(_need(tensors, "prompt_mask"), data.flat_seqlens("packed_input_ids"))
    gaps = (tensors["proximal_logprobs"] - tensors["packed_logprobs"]).double().abs()[response]
    return means({"sampler_gap": (gaps.sum(), len(gaps))}, all_reduce)


def reduce_over(model: Model) -> AllReduce:
    """Sums over the ranks of a role; a role without an engine has only one."""
    engine = model.module
    if engine is None:
        return identity
    return lambda value: engine.all_reduce(value.to(engine.device), "sum").to(value.device)


def means(pairs: Mapping[str, tuple[torch.Tensor, int]], all_reduce: AllReduce) -> dict[str, float]:
    """{name: (sum, count)} → {name: sum / count over all ranks}; 0 where nothing was counted."""
    sums = torch.stack([total.detach().to("cpu", torch.float64) for total, _ in pairs.values()])
    counts = torch.tensor([count for _, count in pairs.values()], dtype=torch.float64)
    table = all_reduce(torch.stack([sums, counts]))
    return {name: float(table[0, i] / table[1, i].clamp(min=1)) for i, name in enumerate(pairs)}


def response_kl(batch: SequenceSample, all_reduce: AllReduce) -> tuple[float, int]:
    """(KL from the reference per response in nats, responses), over all ranks: the input of a KL controller."""
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
