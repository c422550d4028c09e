"""Settings for the steps between a finished rollout and the loss: rewards, the KL penalty, advantages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from rlcli.api.limits import Limits
from rlcli.api.synonyms import Synonyms
from rlcli.ops.advantages import BaselineName, CreditName, ScaleName, Trajectories, generalized, relative
from rlcli.ops.kl import AdaptiveKLController, FixedKLController, KLController, KLEstimator, KLGradient
from rlcli.ops.normalization import group_normalize, masked_normalize
from rlcli.ops.packing import action_owner
from rlcli.ops.reduce import AllReduce

from ._checked import Settings
from ._settings import OldPolicy, Sampling

KLPlace = Literal["loss", "reward"]


@dataclass(kw_only=True)
class RewardShaping(Settings):
    """How the score of a response becomes its reward."""

    LIMITS: ClassVar[Limits] = {
        "max_reward_clip": {"gt": 0}, "overlong_buffer": {"ge": 1}, "overlong_penalty": {"gt": 0},
    }  # fmt: skip
    SYNONYMS: ClassVar[Synonyms] = {
        "reward_output_bias": "reward_bias",
        "reward_output_scaling": "reward_scaling reward_scale",
        "max_reward_clip": "reward_clip reward_clip_range cliprange_reward",
        "mask_too_long": "mask_truncated_completions overlong_filtering",
        "mask_no_eos_with_zero": "missing_eos_penalty",
        "overlong_buffer": "overlong_buffer.len overlong_buffer_len overlong_tokens soft_punish_cache",
        "overlong_penalty": "overlong_buffer.penalty_factor overlong_penalty_factor overlong_reward_penalty",
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
    """Soft overlong penalty (DAPO): over this many tokens at the end of `generation.max_new_tokens`, the reward of a
    response falls, token by token, by up to `overlong_penalty`."""

    overlong_penalty: float = 1.0
    """With `overlong_buffer`: amount subtracted from the reward of a response of full length."""

    use_dense_reward: bool = False
    """Use `dense_rewards` (a score after each token) instead of the single task reward at the end."""

    reward_delta: bool = True
    """With `use_dense_reward`: a token earns the change in the score, not the score."""


@dataclass(kw_only=True)
class KLPenalty(Settings):
    """How strongly the policy is pulled towards the reference."""

    LIMITS: ClassVar[Limits] = {
        "kl_ctl": {"ge": 0}, "adaptive_kl_target": {"gt": 0}, "adaptive_kl_horizon": {"gt": 0},
    }  # fmt: skip
    SYNONYMS: ClassVar[Synonyms] = {
        "kl_ctl": (
            "kl_coef kl_coeff init_kl_coef kl_loss_coef beta pref_beta reference_policy_kl_penalty kl_penalty_coef"
        ),
        "kl_estimator": "kl_penalty kl_loss_type kl_type use_kl_estimator_k3 reference_policy_kl_type",
        "adaptive_kl_ctl": "kl_ctrl.type adap_kl_ctrl adaptive_kl_coef use_adaptive_kl",
        "adaptive_kl_target": "kl_target target_kl ppo_target kl_ctrl.target adaptive_kl.target",
        "adaptive_kl_horizon": "kl_horizon kl_ctrl.horizon horizon",
    }

    STALE_NEEDS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "adaptive_kl_ctl": ("recompute_logprob", "use_decoupled_loss"),
    }

    kl_ctl: float = 0.1
    """Weight of the KL penalty per token (its starting value with `adaptive_kl_ctl`)."""

    kl_estimator: KLEstimator = "k1"
    """Estimator of the penalty, the KL from the reference per sampled token: k1, k2 or k3 (rlcli.ops.kl). It is that of
    the policy that sampled the responses; see `recompute_logprob`."""

    adaptive_kl_ctl: bool = False
    """Adapt the weight of the KL penalty to keep the metric `kl`, that of the trained policy, near
    `adaptive_kl_target`. Above `train.max_staleness: 0` this needs `recompute_logprob` or `use_decoupled_loss`."""

    adaptive_kl_target: float = 6.0
    """KL per response, in nats, targeted by the adaptive controller."""

    adaptive_kl_horizon: float = 10000.0
    """Responses over which the adaptive controller reacts."""

    controller: KLController = field(init=False, repr=False)
    """Holds the current weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptive_kl_ctl and self.kl_ctl == 0:
            raise ValueError("adaptive_kl_ctl multiplies kl_ctl, which is 0 and would stay 0")
        if self.adaptive_kl_ctl:
            self.controller = AdaptiveKLController(self.kl_ctl, self.adaptive_kl_target, self.adaptive_kl_horizon)
        else:
            self.controller = FixedKLController(self.kl_ctl)


@dataclass(kw_only=True)
class KLPlacement(Settings):
    """Where the KL penalty is applied, for algorithms that may have it in the loss."""

    SYNONYMS: ClassVar[Synonyms] = {"kl_in": "use_kl_loss use_kl_in_reward"}

    kl_in: KLPlace = "loss"
    """loss: the penalty is added to the loss of each token, with a gradient of its own. reward: it is subtracted from
    the reward of each token, and so enters the advantages."""

    kl_gradient: KLGradient = "reverse"
    """Gradient of the penalty in the loss. reverse: that of the KL of the policy from the reference, whichever
    `kl_estimator` gives the value; tokens are weighted by their ratio to the sampling policy. naive: that of the
    estimator itself, which is zero for k1 and that of a different KL for k3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_gradient == "naive" and self.kl_in == "reward":
            raise ValueError("kl_gradient has no effect with kl_in: reward")


@dataclass(kw_only=True)
class Advantages(Settings):
    """How much better than expected an action was: settings shared by all estimators."""

    SYNONYMS: ClassVar[Synonyms] = {
        "adv_norm": "whiten_advantages whiten_rewards normalize_advantages advantage_normalization",
    }

    adv_norm: bool = True
    """Normalise advantages to mean 0 and standard deviation 1 over the batch's tokens."""

    @property
    def needs_values(self) -> bool:
        """Whether the estimate needs a critic."""
        return False

    def estimate(self, trajectories: Trajectories, all_reduce: AllReduce) -> tuple[torch.Tensor, torch.Tensor]:
        """(advantages, returns), both [A]."""
        raise NotImplementedError

    def normalized(
        self, advantages: torch.Tensor, trajectories: Trajectories, trained: torch.Tensor, all_reduce: AllReduce
    ) -> torch.Tensor:
        """[A]: advantages of the actions that are trained on, 0 elsewhere."""
        if not self.adv_norm:
            return torch.where(trained, advantages, 0.0)
        return masked_normalize(advantages, trained, all_reduce=all_reduce)


@dataclass(kw_only=True)
class GeneralizedAdvantages(Advantages):
    """Advantages relative to a critic's values (`rlcli.ops.gae`)."""

    LIMITS: ClassVar[Limits] = {"discount": {"ge": 0, "le": 1}, "gae_lambda": {"ge": 0, "le": 1}}
    SYNONYMS: ClassVar[Synonyms] = {
        "gae_lambda": "lam lambd lmbda gae_lam",
        "discount": "gamma",
    }

    discount: float = 1.0
    """Discount factor per token."""

    gae_lambda: float = 1.0
    """Trades bias against variance of advantages: 1 waits for the final reward, 0 trusts the critic's next value."""

    group_adv_norm: bool = False
    """Normalise advantages over the tokens of the responses to one prompt, instead of over the batch."""

    disable_value: bool = False
    """Train without a critic: all values are 0, advantages are the discounted future rewards."""

    bootstrap_no_eos: bool = True
    """For a response that was cut off, the critic's value of its last state stands in for the missing rest. If cut-off
    responses have a score too, the two add up; where most are cut off, values can diverge: then set this to
    false."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_adv_norm and not self.adv_norm:
            raise ValueError("group_adv_norm says how adv_norm works; it has no effect with adv_norm: false")

    @property
    def needs_values(self) -> bool:
        return not self.disable_value

    def estimate(self, trajectories: Trajectories, all_reduce: AllReduce) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.bootstrap_no_eos:
            trajectories = replace(trajectories, bootstrap=torch.zeros_like(trajectories.bootstrap))
        return generalized(trajectories, discount=self.discount, gae_lambda=self.gae_lambda)

    def normalized(
        self, advantages: torch.Tensor, trajectories: Trajectories, trained: torch.Tensor, all_reduce: AllReduce
    ) -> torch.Tensor:
        if not self.group_adv_norm:
            return super().normalized(advantages, trajectories, trained, all_reduce)
        group = trajectories.group[action_owner(trajectories.seqlens, trained.device)]
        return group_normalize(advantages, group, trained)


@dataclass(kw_only=True)
class RelativeAdvantages(Advantages):
    """Advantages without a critic: what a response earned, compared with others."""

    SYNONYMS: ClassVar[Synonyms] = {
        "baseline": "mean_level mean_leave1out",
        "scale": "scale_rewards norm_adv_by_std_in_grpo std_level",
    }

    baseline: BaselineName = "group"
    """What is subtracted: the mean of the responses to the same prompt (group), of the other responses to it
    (leave_one_out), of all responses in the batch (batch), or nothing (none)."""

    scale: ScaleName = "group"
    """What it is divided by: the standard deviation of the rewards of the responses to the same prompt (group), of all
    responses in the batch (batch), or nothing (none)."""

    credit: CreditName = "response"
    """response: each token is credited with everything its response earned. to_go: only with what came after it, which
    makes a difference where the KL penalty is in the reward, or rewards are dense."""

    @property
    def compares_groups(self) -> bool:
        """Whether a single response to a prompt would carry no signal."""
        return self.baseline in ("group", "leave_one_out") or self.scale == "group"

    def estimate(self, trajectories: Trajectories, all_reduce: AllReduce) -> tuple[torch.Tensor, torch.Tensor]:
        return relative(trajectories, all_reduce, baseline=self.baseline, scale=self.scale, credit=self.credit)


@dataclass(kw_only=True)
class RolloutSettings(Advantages, KLPenalty, RewardShaping, OldPolicy, Sampling):
    """All settings needed to process a finished rollout (`_rollout.prepare`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = self.generation.max_new_tokens
        if self.overlong_buffer is not None and self.overlong_buffer > limit:
            raise ValueError(
                f"overlong_buffer is {self.overlong_buffer}; it must be at most generation.max_new_tokens, {limit}"
            )
