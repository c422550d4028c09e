"""From finished responses to what a policy and a critic are trained on: rewards, the KL penalty,
advantages, returns.

An estimator is a subclass of `AdvantageInterface` with an `estimate`; everything else is shared. It
is a call of the graph that takes the whole batch of a step, so that policy and critic learn from
the same numbers, computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration, DeclaredKeys
from rlcli.api.key_meaning import CHOSEN, SEQUENCES
from rlcli.api.limits import Limits, Needs
from rlcli.api.metrics import Metrics
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface
from rlcli.api.synonyms import Synonyms
from rlcli.errors import UsageError
from rlcli.ops.advantages import Trajectories
from rlcli.ops.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    KLEstimator,
    kl_estimate,
    kl_of_policy,
)
from rlcli.ops.normalization import masked_normalize
from rlcli.ops.packing import action_owner
from rlcli.ops.policy_losses import BehaviourWeightMode, behaviour_weights
from rlcli.ops.reduce import AllReduce
from rlcli.ops.rewards import (
    action_mask,
    dense_rewards,
    overlong_penalties,
    shape_scores,
    token_rewards,
)

from ._sequences import best_of_each, group_of_each
from ._statistics import reduce_over

KLPlace = Literal["loss", "reward"]


@dataclass(frozen=True)
class Responses:
    """The sequences of a batch, and which of their A = T - N actions belong to responses that
    count."""

    data: SequenceSample
    lengths: list[int]
    """N lengths in tokens."""
    owner: torch.Tensor
    """[A] int64: the sequence of each action."""
    chosen: torch.Tensor
    """[N] bool: the responses that are trained on."""
    actions: torch.Tensor
    """[A] bool: the actions that chose a token of one of these."""

    @property
    def group_sizes(self) -> list[int]:
        """The number of sequences of each sample."""
        return [len(lengths) for lengths in self.data.seqlens[SEQUENCES]]

    @property
    def were_cut_off(self) -> torch.Tensor:
        """[N] bool."""
        return need(self.data, "seq_no_eos_mask")

    def sums_by_sample(
        self, numbers: torch.Tensor, counted: torch.Tensor
    ) -> list[tuple[float, int]]:
        """For each sample the sum of the numbers [N] of its sequences that count,
        and how many these are."""
        group = group_of_each(self.data).to(counted.device)[counted]
        zeros = torch.zeros(self.data.bs, dtype=torch.float64, device=counted.device)
        sums = zeros.index_add(0, group, numbers[counted].double()).tolist()
        return list(zip(sums, torch.bincount(group, minlength=self.data.bs).tolist(), strict=True))


@dataclass(frozen=True)
class OldPolicy:
    """What the log-probs of the responses say about the policies behind them; all [A]."""

    sampler: torch.Tensor
    """Log-probs of the policy that sampled, which pays the KL penalty."""
    old: torch.Tensor
    """Log-probs that the ratio of the loss is taken to."""
    weights: torch.Tensor
    """Weight of each action in the decoupled loss, else 1."""
    trained: torch.Tensor
    """bool: the actions that are trained on."""


@dataclass(kw_only=True)
class AdvantageInterface(ModelInterface):
    """Rates every action of a batch of responses. Subclasses say how, in `estimate`."""

    READS: ClassVar[Declaration] = {
        "inference": (
            "packed_input_ids",
            "prompt_mask",
            "packed_logprobs",
            "seq_no_eos_mask",
            "packed_ref_logprobs if kl_ctl",
            "proximal_logprobs if use_decoupled_loss",
            "proximal_logprobs if recompute_logprob",
            "dense_rewards if use_dense_reward",
            "rewards unless use_dense_reward",
            "rewards if train_on_best",
        )
    }
    WRITES: ClassVar[Declaration] = {
        "inference": (
            "advantages",
            "returns",
            "loss_mask",
            "old_logprobs",
            "loss_weights if use_decoupled_loss",
            "kl_weights if kl_in=loss",
            "chosen if train_on_best",
        )
    }
    NEEDS_GROUP: ClassVar[Declaration] = {"inference": ("above train_on_best",)}
    TAKES_BATCH: ClassVar[tuple[str, ...]] = ("inference",)

    LIMITS: ClassVar[Limits] = {
        "max_reward_clip": {"gt": 0},
        "overlong_buffer": {"ge": 1},
        "overlong_penalty": {"gt": 0},
        "overlong_limit": {"ge": 1},
        "train_on_best": {"ge": 1},
        "behav_imp_weight_cap": {"gt": 1},
        "kl_ctl": {"ge": 0},
        "adaptive_kl_target": {"gt": 0},
        "adaptive_kl_horizon": {"gt": 0},
    }
    NEEDS: ClassVar[Needs] = {
        "overlong_buffer": "overlong_limit",
        "adaptive_kl_ctl": "kl_ctl",
        "behav_imp_weight_cap": "use_decoupled_loss",
        "behav_imp_weight_mode=truncate": "behav_imp_weight_cap",
    }
    SYNONYMS: ClassVar[Synonyms] = {
        "reward_output_bias": "reward_bias",
        "reward_output_scaling": "reward_scaling reward_scale",
        "max_reward_clip": "reward_clip reward_clip_range cliprange_reward",
        "mask_too_long": "mask_truncated_completions overlong_filtering",
        "mask_no_eos_with_zero": "missing_eos_penalty",
        "overlong_buffer": (
            "overlong_buffer.len overlong_buffer_len overlong_tokens soft_punish_cache"
        ),
        "overlong_penalty": (
            "overlong_buffer.penalty_factor overlong_penalty_factor overlong_reward_penalty"
        ),
        "kl_ctl": (
            "kl_coef kl_coeff init_kl_coef kl_loss_coef beta pref_beta "
            "reference_policy_kl_penalty kl_penalty_coef"
        ),
        "kl_estimator": (
            "kl_penalty kl_loss_type kl_type use_kl_estimator_k3 reference_policy_kl_type"
        ),
        "kl_in": "use_kl_loss use_kl_in_reward",
        "adaptive_kl_ctl": "kl_ctrl.type adap_kl_ctrl adaptive_kl_coef use_adaptive_kl",
        "adaptive_kl_target": "kl_target target_kl ppo_target kl_ctrl.target adaptive_kl.target",
        "adaptive_kl_horizon": "kl_horizon kl_ctrl.horizon horizon",
        "behav_imp_weight_cap": (
            "behave_imp_weight_cap rollout_is_threshold vllm_importance_sampling_cap "
            "vllm_importance_sampling_clip_max tis_imp_ratio_cap"
        ),
        "behav_imp_weight_mode": "behave_imp_weight_mode rollout_is vllm_importance_sampling_mode",
        "adv_norm": "whiten_advantages whiten_rewards normalize_advantages advantage_normalization",
    }
    CHANGED: ClassVar[Mapping[str, str]] = {
        "generation_size": (
            "set generation.responses_per_prompt to all that are sampled, "
            "train_on_best to those kept"
        ),
    }
    STALE_NEEDS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "adaptive_kl_ctl": ("recompute_logprob", "use_decoupled_loss"),
    }
    METRICS: ClassVar[Metrics] = {
        "kl_coef": ("reward per nat", "weight of the KL penalty in the step"),
        "shaped_reward": (
            "reward",
            "mean reward of the responses after scaling, clipping and length penalties",
        ),
        "reward_clip_fraction": ("share", "share of responses whose reward max_reward_clip clips"),
        "response_length": ("tokens", "mean length of the responses"),
        "no_eos_fraction": ("share", "share of responses that were cut off"),
        "advantage": (
            "advantage",
            "mean over the responses of the mean advantage of their trained tokens",
        ),
        "advantage_abs": ("advantage", "the same of the size of advantages"),
    }

    reward_output_bias: float = 0.0
    """Subtracted from task rewards: (reward - bias) * scaling."""

    reward_output_scaling: float = 1.0
    """Multiplies task rewards after the bias is subtracted."""

    max_reward_clip: float = 20.0
    """Task rewards are clipped to ± this after bias and scaling."""

    mask_no_eos_with_zero: bool = False
    """Responses that were cut off get task reward 0."""

    mask_too_long: bool = False
    """Responses that were cut off are not trained on."""

    overlong_buffer: int | None = None
    """Soft overlong penalty (DAPO): over the last tokens before `overlong_limit`, this many, the
    reward of a response falls, token by token, by up to `overlong_penalty`."""

    overlong_penalty: float = 1.0
    """With `overlong_buffer`: amount subtracted from the reward of a response of full length."""

    overlong_limit: int | None = None
    """With `overlong_buffer`: the most tokens of a response, `${generation.max_new_tokens}`."""

    use_dense_reward: bool = False
    """Use `dense_rewards` (a score after each token)
    instead of the single task reward at the end."""

    reward_delta: bool = True
    """With `use_dense_reward`: a token earns the change in the score, not the score."""

    train_on_best: int | None = None
    """Train on this many responses to each prompt, those with the highest reward; null: on all."""

    kl_ctl: float = 0.1
    """Weight of the KL penalty per token (its starting value with `adaptive_kl_ctl`); 0:
    needs no reference."""

    kl_in: KLPlace = "reward"
    """reward: the penalty is subtracted from the reward of each token, and so enters the
    advantages. loss: it is added to the policy's loss of each token, with a gradient of its own."""

    kl_estimator: KLEstimator = "k1"
    """Estimator of the penalty, the KL from the reference per sampled token: k1, k2 or k3
    (rlcli.ops.kl). It is that of the policy that sampled the responses; see `recompute_logprob`."""

    adaptive_kl_ctl: bool = False
    """Adapt the weight of the KL penalty to keep the metric `kl`, that of the trained policy, near
    `adaptive_kl_target`. Above `train.max_staleness: 0` this needs `recompute_logprob` or
    `use_decoupled_loss`."""

    adaptive_kl_target: float = 6.0
    """KL per response, in nats, targeted by the adaptive controller."""

    adaptive_kl_horizon: float = 10000.0
    """Responses over which the adaptive controller reacts."""

    use_decoupled_loss: bool = False
    """Clip around `proximal_logprobs` and weight each token by proximal over behaviour policy.
    Requires an `actor.inference` call in the graph, with `packed_logprobs` renamed to
    `proximal_logprobs`. The KL penalty stays that of the behaviour policy,
    which sampled the responses."""

    recompute_logprob: bool = False
    """Use `proximal_logprobs`, from the trainer's own forward pass, as the old policy instead of
    the sampler's: for the ratio and, unless `use_decoupled_loss` is also set,
    for the KL penalty."""

    behav_imp_weight_cap: float | None = None
    """With `use_decoupled_loss`: maximum weight of a token; above 1."""

    behav_imp_weight_mode: BehaviourWeightMode = "mask"
    """How to treat a token weighted above the cap. mask: it is dropped from the loss and from the
    count that divides it. truncate: it is weighted by the cap (truncated importance sampling,
    TIS)."""

    adv_norm: bool = True
    """Normalise advantages to mean 0 and standard deviation 1 over the batch's tokens."""

    controller: KLController = field(init=False, repr=False)
    """Holds the current weight of the KL penalty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        buffer, limit = self.overlong_buffer, self.overlong_limit
        if buffer is not None and limit is not None and buffer > limit:
            raise ValueError(
                f"overlong_buffer is {buffer}; it must be at most {limit}, overlong_limit"
            )
        if self.adaptive_kl_ctl:
            self.controller = AdaptiveKLController(
                self.kl_ctl, self.adaptive_kl_target, self.adaptive_kl_horizon
            )
        else:
            self.controller = FixedKLController(self.kl_ctl)

    # -- what an estimator defines -----------------------------------------------------------------

    def estimate(
        self, trajectories: Trajectories, all_reduce: AllReduce
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(advantages, returns), both [A] float32; `all_reduce` sums over the ranks that share the
        batch."""
        raise NotImplementedError

    def values(self, data: SequenceSample) -> torch.Tensor:
        """[T] the value of the state after each token; zeros without a critic."""
        return torch.zeros_like(data.data[SEQUENCES], dtype=torch.float32)

    def normalize(
        self,
        advantages: torch.Tensor,
        trajectories: Trajectories,
        trained: torch.Tensor,
        all_reduce: AllReduce,
    ) -> torch.Tensor:
        """[A]: advantages of the actions that are trained on, 0 elsewhere."""
        if not self.adv_norm:
            return torch.where(trained, advantages, 0.0)
        return masked_normalize(advantages, trained, all_reduce=all_reduce)

    # -- the call ----------------------------------------------------------------------------------

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """A batch of responses → `advantages`, `returns`, `loss_mask`, `old_logprobs` [A], with
        some settings also `loss_weights`, `kl_weights` [A] and `chosen` [N];
        for A = T - N actions of N sequences."""
        reduce = reduce_over(model)
        responses = self._responses(data)
        policy = self._old_policy(responses)
        scores = self._scores(responses)
        trajectories = self._trajectories(responses, policy, scores)
        advantages, returns = self.estimate(trajectories, reduce)
        advantages = self.normalize(advantages, trajectories, policy.trained, reduce)
        numbers = self.numbers(responses, scores, advantages, policy.trained)
        returns = torch.where(responses.actions, returns, 0.0)
        per_action = {
            "advantages": advantages,
            "returns": returns,
            "loss_mask": policy.trained,
            "old_logprobs": policy.old,
            "loss_weights": policy.weights,
            "kl_weights": torch.where(responses.actions, self.controller.coef, 0.0),
        }
        self._control(responses, reduce)
        return _outputs(responses, per_action, self.writes("inference"), numbers)

    def state_dict(self) -> dict[str, Any]:
        return {"kl_controller": self.controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controller.load_state_dict(state["kl_controller"])

    def numbers(
        self,
        responses: Responses,
        scores: torch.Tensor,
        advantages: torch.Tensor,
        trained: torch.Tensor,
    ) -> dict[str, list[tuple[float, int]]]:
        """The numbers in `METRICS`, for each sample as a sum over its responses and their count.
        `scores`: the shaped reward of each, [N]; `advantages` and `trained`, bool, are [A]."""
        counted, no_eos = responses.chosen, responses.were_cut_off
        tokens = torch.bincount(
            responses.owner[responses.actions], minlength=len(responses.lengths)
        )
        means, sizes, are_trained = _means_per_response(advantages, trained, responses)
        per_response = {
            "kl_coef": (
                torch.full_like(scores, self.controller.coef, dtype=torch.float64),
                counted,
            ),
            "shaped_reward": (scores, counted),
            "response_length": (tokens, counted),
            "no_eos_fraction": (no_eos, counted),
            "advantage": (means, are_trained),
            "advantage_abs": (sizes, are_trained),
        }
        if not self.use_dense_reward:
            rewards = need(responses.data, "rewards").double()
            scaled = (rewards - self.reward_output_bias) * self.reward_output_scaling
            per_response["reward_clip_fraction"] = (scaled.abs() > self.max_reward_clip, counted)
        return {name: responses.sums_by_sample(*columns) for name, columns in per_response.items()}

    # -- its steps ---------------------------------------------------------------------------------

    def _responses(self, data: SequenceSample) -> Responses:
        lengths, prompt_mask = data.flat_seqlens(SEQUENCES), need(data, "prompt_mask")
        owner = action_owner(lengths, prompt_mask.device)
        chosen = torch.ones(len(lengths), dtype=torch.bool, device=prompt_mask.device)
        if self.train_on_best is not None:
            need(data, "rewards")
            chosen = best_of_each(data, self.train_on_best).to(prompt_mask.device)
        return Responses(
            data, lengths, owner, chosen, action_mask(prompt_mask, lengths) & chosen[owner]
        )

    def _old_policy(self, responses: Responses) -> OldPolicy:
        """Which log-probs stand for which policy.

        The KL penalty is that of the sampling policy, because the estimators of `rlcli.ops.kl` are
        expectations over its samples: with another policy's log-probs they do not estimate a KL at
        all. `recompute_logprob` uses the trainer's numbers for that policy, everywhere;
        `use_decoupled_loss` keeps the sampler's, and uses the proximal policy only in the loss.
        AReaL does the same.
        """
        behaviour, trained = need(responses.data, "packed_logprobs"), responses.actions
        ones = torch.ones_like(behaviour)
        if self.mask_too_long:
            trained = trained & ~responses.were_cut_off[responses.owner]
        if not (self.use_decoupled_loss or self.recompute_logprob):
            return OldPolicy(behaviour, behaviour, ones, trained)
        proximal = need(
            responses.data,
            "proximal_logprobs",
            "or turn use_decoupled_loss and recompute_logprob off",
        )
        if not self.use_decoupled_loss:
            return OldPolicy(proximal, proximal, ones, trained)
        cap, mode = self.behav_imp_weight_cap, self.behav_imp_weight_mode
        weights, remaining = behaviour_weights(proximal, behaviour, trained, cap, mode)
        return OldPolicy(behaviour, proximal, weights, remaining)

    def _scores(self, responses: Responses) -> torch.Tensor:
        """[N] the shaped score of each response; 0 with dense rewards,
        but for the penalty on long ones."""
        no_eos = responses.were_cut_off
        if self.use_dense_reward:
            scores = torch.zeros(len(no_eos), device=no_eos.device)
        else:
            scores = shape_scores(
                need(responses.data, "rewards"),
                no_eos,
                scaling=self.reward_output_scaling,
                bias=self.reward_output_bias,
                clip=self.max_reward_clip,
                mask_no_eos_with_zero=self.mask_no_eos_with_zero,
            )
        if self.overlong_buffer is None:
            return scores
        assert self.overlong_limit is not None  # NEEDS
        tokens = torch.bincount(responses.owner[responses.actions], minlength=len(no_eos))
        beyond = overlong_penalties(tokens, self.overlong_limit, self.overlong_buffer)
        return scores + self.overlong_penalty * beyond.to(scores)

    def _trajectories(
        self, responses: Responses, policy: OldPolicy, scores: torch.Tensor
    ) -> Trajectories:
        data, lengths, dense = responses.data, responses.lengths, None
        if self.use_dense_reward:
            states = need(data, "dense_rewards", "or set use_dense_reward: false")
            dense = dense_rewards(
                states, lengths, self.reward_delta, self.reward_output_scaling, self.max_reward_clip
            )
        kl = torch.zeros_like(policy.sampler)
        if self.kl_ctl and self.kl_in == "reward":
            reference = need(data, "packed_ref_logprobs", "or set kl_ctl: 0")
            penalty = kl_estimate(policy.sampler, reference, self.kl_estimator)
            kl = torch.where(responses.actions, penalty, 0.0)
        rewards = token_rewards(scores, kl, responses.actions, lengths, self.controller.coef, dense)
        group = group_of_each(data).to(rewards.device)
        return Trajectories(
            rewards, self.values(data), responses.actions, lengths, group, responses.were_cut_off
        )

    def _control(self, responses: Responses, all_reduce: AllReduce) -> None:
        """Adapt the weight of the penalty to the KL of the trained policy per response, in nats.
        Where nobody has computed its log-probs, the sampler's stand for them."""
        if not self.adaptive_kl_ctl:
            return
        sampled, reference = (
            need(responses.data, key) for key in ("packed_logprobs", "packed_ref_logprobs")
        )
        is_recomputed = self.use_decoupled_loss or self.recompute_logprob
        trained = need(responses.data, "proximal_logprobs") if is_recomputed else sampled
        total = (
            torch.where(responses.actions, kl_of_policy(trained, sampled, reference), 0.0)
            .double()
            .sum()
        )
        table = all_reduce(torch.stack([total, responses.chosen.sum().to(total)]))
        self.controller.update(float(table[0] / table[1].clamp(min=1)), int(table[1]))


def need(data: SequenceSample, key: str, otherwise: str = "") -> torch.Tensor:
    """The tensor of a key. Raises UsageError R61 if the call does not receive it."""
    if key not in data.keys:
        hint = f"add {key} to the call's inputs" + (f", {otherwise}" if otherwise else "")
        raise UsageError(
            f"advantages need the key {key}, which the call does not receive", hint=hint, code="R61"
        )
    return data.data[key]


def _means_per_response(
    advantages: torch.Tensor, trained: torch.Tensor, responses: Responses
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mean advantage of the trained actions of each response, mean size, whether it has any),
    all [N]."""
    owner, count = responses.owner[trained], len(responses.lengths)
    actions = torch.bincount(owner, minlength=count)
    zeros = torch.zeros(count, dtype=torch.float64, device=advantages.device)
    sums = zeros.index_add(0, owner, advantages[trained].double())
    sizes = zeros.index_add(0, owner, advantages[trained].double().abs())
    return sums / actions.clamp(min=1), sizes / actions.clamp(min=1), actions > 0


def _outputs(
    responses: Responses,
    per_action: Mapping[str, torch.Tensor],
    declared: DeclaredKeys | None,
    numbers: Mapping[str, list[tuple[float, int]]],
) -> SequenceSample:
    """The keys that the settings call for, and the numbers as metadata."""
    assert declared is not None  # WRITES
    data = responses.data
    tokens = data.seqlens[SEQUENCES]
    tensors = {
        key: rows
        for key, rows in {**per_action, CHOSEN: responses.chosen}.items()
        if key in declared.needed
    }
    of_actions = [[length - 1 for length in lengths] for lengths in tokens]
    of_sequences = [[1] * len(lengths) for lengths in tokens]
    seqlens = {key: of_sequences if key == CHOSEN else of_actions for key in tensors}
    return SequenceSample.from_default(
        ids=data.ids, seqlens=seqlens, data=tensors, metadata=dict(numbers)
    )
