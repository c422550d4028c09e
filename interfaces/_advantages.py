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
from rlcli.api.declared_keys import Declaration
from rlcli.api.key_meaning import CHOSEN, REWARDS, SEQUENCES
from rlcli.api.limits import ArgumentCheck, Limits, Needs
from rlcli.api.metrics import Metrics
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface
from rlcli.api.synonyms import Synonyms
from rlcli.ops.advantages import Trajectories
from rlcli.ops.kl import AdaptiveKLController, FixedKLController, KLController, KLEstimator
from rlcli.ops.normalization import masked_normalize
from rlcli.ops.policy_losses import BehaviourWeightLevel, BehaviourWeightMode
from rlcli.ops.reduce import AllReduce

from ._advantage_steps import (
    OldPolicy,
    Responses,
    earned,
    kl_per_response,
    old_policy,
    responses_of,
    rewards_of_actions,
    shaped_scores,
)
from ._argument_checks import check_overlong

KLPlace = Literal["loss", "reward"]
SumsBySample = dict[str, list[tuple[float, int]]]
"""Name of a number → for each sample the sum over its responses, and their count."""


@dataclass(kw_only=True)
class AdvantageInterface(ModelInterface):
    """Computes the advantage of every action in a batch of responses. Subclasses implement
    `estimate`."""

    READS: ClassVar[Declaration] = {
        "inference": (
            "packed_input_ids",
            "prompt_mask",
            "packed_logprobs",
            "seq_no_eos_mask",
            "forks if given",
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
    ARGUMENT_CHECK: ClassVar[ArgumentCheck] = "_argument_checks.check_overlong"
    NEEDS_GROUP: ClassVar[Declaration] = {"inference": ("above train_on_best",)}
    TAKES_BATCH: ClassVar[tuple[str, ...]] = ("inference",)

    LIMITS: ClassVar[Limits] = {
        "max_reward_clip": {"gt": 0},
        "overlong_buffer": {"ge": 1},
        "overlong_penalty": {"gt": 0},
        "overlong_limit": {"ge": 1},
        "train_on_best": {"ge": 1},
        "behav_imp_weight_cap": {"gt": 1},
        "behav_imp_weight_floor": {"gt": 0, "lt": 1},
        "kl_ctl": {"ge": 0},
        "adaptive_kl_target": {"gt": 0},
        "adaptive_kl_horizon": {"gt": 0},
    }
    NEEDS: ClassVar[Needs] = {
        "overlong_buffer": "overlong_limit",
        "overlong_penalty": "overlong_buffer",
        "reward_delta": "use_dense_reward",
        "reward_output_bias": "use_dense_reward=False",
        "mask_no_eos_with_zero": "use_dense_reward=False",
        "adaptive_kl_ctl": "kl_ctl",
        "adaptive_kl_target": "adaptive_kl_ctl",
        "adaptive_kl_horizon": "adaptive_kl_ctl",
        "behav_imp_weight_cap": "use_decoupled_loss",
        "behav_imp_weight_floor": "use_decoupled_loss",
        "behav_imp_weight_level=sequence|geometric": "use_decoupled_loss",
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
            "vllm_importance_sampling_clip_max tis_imp_ratio_cap tis_clip tis_upper_bound"
        ),
        "behav_imp_weight_floor": "vllm_importance_sampling_clip_min tis_clip_low tis_lower_bound",
        "behav_imp_weight_mode": "behave_imp_weight_mode vllm_importance_sampling_mode tis_mode",
        "behav_imp_weight_level": "rollout_is rollout_rs tis_level tis_ratio_type",
        "adv_norm": "whiten_advantages whiten_rewards normalize_advantages advantage_normalization",
    }
    CHANGED: ClassVar[Mapping[str, str]] = {
        "generation_size": (
            "set generation.responses_per_prompt to the number sampled, train_on_best to the "
            "number kept"
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
    """Soft overlong penalty (DAPO): if a response reaches the last `overlong_buffer` tokens before
    `overlong_limit`, each further token lowers its reward, in total by up to `overlong_penalty`.
    Of an episode what was observed counts too, as it does for `generation.max_new_tokens`."""

    overlong_penalty: float = 1.0
    """With `overlong_buffer`: amount subtracted from the reward of a response of full length."""

    overlong_limit: int | None = None
    """With `overlong_buffer`: the maximum length of a response, `${generation.max_new_tokens}`."""

    use_dense_reward: bool = False
    """Use `dense_rewards` (a score after each token)
    instead of the single task reward at the end."""

    reward_delta: bool = True
    """With `use_dense_reward`: the reward of a token is the change in the score, not the score
    itself."""

    train_on_best: int | None = None
    """Train on this many responses to each prompt, those with the highest reward; null: on all.
    Metrics of this call are those of the same responses."""

    kl_ctl: float = 0.1
    """Weight of the KL penalty per token (its starting value with `adaptive_kl_ctl`); 0: no
    penalty, and no reference is needed."""

    kl_in: KLPlace = "reward"
    """reward: the penalty is subtracted from the reward of each token, and so enters the
    advantages. loss: it is added to the policy's loss of each token, with a gradient of its own."""

    kl_estimator: KLEstimator = "k1"
    """Estimator of the penalty in the reward, the KL from the reference per sampled token: k1, k2
    or k3 (rlcli.ops.kl); of one in the loss it is `kl_estimator` of `ppo_actor`. It is measured for
    the policy that sampled the responses, unless `recompute_logprob` changes that."""

    adaptive_kl_ctl: bool = False
    """Adapt the weight of the KL penalty to keep the KL of a response near `adaptive_kl_target`:
    the metric `kl`, which is measured for the trained policy, added up over its tokens. Above
    `train.max_staleness: 0` this needs `recompute_logprob` or `use_decoupled_loss`."""

    adaptive_kl_target: float = 6.0
    """KL per response, in nats, targeted by the adaptive controller."""

    adaptive_kl_horizon: float = 10000.0
    """Number of responses over which the adaptive controller adapts."""

    use_decoupled_loss: bool = False
    """Clip around `proximal_logprobs` and weight each token by proximal over behaviour policy.
    Requires an `actor.inference` call in the graph, with `packed_logprobs` renamed to
    `proximal_logprobs`. The KL penalty is still that of the behaviour policy, which sampled the
    responses."""

    recompute_logprob: bool = False
    """Use `proximal_logprobs`, from the trainer's own forward pass, as the old policy instead of
    the sampler's: for the ratio and, unless `use_decoupled_loss` is also set,
    for the KL penalty."""

    behav_imp_weight_cap: float | None = None
    """With `use_decoupled_loss`: maximum weight of a token; above 1. null: none below e^20,
    which the weight of a whole response may reach; TRL caps it at 3 by default."""

    behav_imp_weight_floor: float | None = None
    """With `use_decoupled_loss`: minimum weight of a token; below 1."""

    behav_imp_weight_mode: BehaviourWeightMode = "mask"
    """How to treat a token weighted above the cap or below the floor. mask: it is left out of the
    loss and of the count that the loss is divided by (with both bounds: IcePop). truncate: it is
    weighted by the bound (with a cap: truncated importance sampling, TIS)."""

    behav_imp_weight_level: BehaviourWeightLevel = "token"
    """With `use_decoupled_loss`: whose weight a token has. token: its own. sequence: that of its
    response, the product of the weights of all trained tokens (masked: MIS). geometric: their
    geometric mean."""

    adv_norm: bool = True
    """Normalise advantages to mean 0 and standard deviation 1 over the batch's tokens."""

    controller: KLController = field(init=False, repr=False)
    """Holds the current weight of the KL penalty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_overlong(self)
        if self.adaptive_kl_ctl:
            self.controller = AdaptiveKLController(
                self.kl_ctl, self.adaptive_kl_target, self.adaptive_kl_horizon
            )
        else:
            self.controller = FixedKLController(self.kl_ctl)

    @property
    def is_recomputed(self) -> bool:
        """Whether the trainer computes log-probs of the responses before it trains on them."""
        return self.use_decoupled_loss or self.recompute_logprob

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
        reduce = model.all_reduce
        responses = responses_of(self, data)
        policy, scores = old_policy(self, responses), shaped_scores(self, responses)
        trajectories = self._trajectories(responses, policy, scores)
        advantages, returns = self.estimate(trajectories, reduce)
        advantages = self.normalize(advantages, trajectories, policy.trained, reduce)
        rewards = earned(self, responses, scores)
        numbers = self.numbers(responses, rewards, advantages, policy.trained)
        output = self._output(responses, policy, advantages, returns, numbers)
        if self.adaptive_kl_ctl:
            self.controller.update(*kl_per_response(self, responses, reduce))
        return output

    def state_dict(self) -> dict[str, Any]:
        return {"kl_controller": self.controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controller.load_state_dict(state["kl_controller"])

    def numbers(
        self,
        responses: Responses,
        rewards: torch.Tensor,
        advantages: torch.Tensor,
        trained: torch.Tensor,
    ) -> SumsBySample:
        """The numbers in `METRICS`, for each sample as a sum over its responses and their count.
        `rewards`: what each has earned, [N]; `advantages` and `trained`, bool, are [A]."""
        counted = responses.chosen
        rows = {
            "kl_coef": (
                torch.full_like(rewards, self.controller.coef, dtype=torch.float64),
                counted,
            ),
            "shaped_reward": (rewards, counted),
            "response_length": (responses.sizes, counted),
            "no_eos_fraction": (responses.were_cut_off, counted),
            "advantage": responses.means(advantages, trained),
            "advantage_abs": responses.means(advantages.abs(), trained),
        }
        if not self.use_dense_reward:
            scores = responses.data.data[REWARDS].double()
            scaled = (scores - self.reward_output_bias) * self.reward_output_scaling
            rows["reward_clip_fraction"] = (scaled.abs() > self.max_reward_clip, counted)
        return {name: responses.sums_by_sample(*columns) for name, columns in rows.items()}

    def _trajectories(
        self, responses: Responses, policy: OldPolicy, scores: torch.Tensor
    ) -> Trajectories:
        return Trajectories(
            rewards=rewards_of_actions(self, responses, policy, scores),
            values=self.values(responses.data),
            mask=responses.actions,
            seqlens=responses.lengths,
            group=responses.group,
            bootstrap=responses.were_cut_off,
            skipped=responses.rereading,
        )

    def _output(
        self,
        responses: Responses,
        policy: OldPolicy,
        advantages: torch.Tensor,
        returns: torch.Tensor,
        numbers: SumsBySample,
    ) -> SequenceSample:
        """The keys that the settings call for, and the numbers as metadata."""
        declared, data = self.writes("inference"), responses.data
        assert declared is not None
        rows = {
            "advantages": advantages,
            "returns": torch.where(responses.actions, returns, 0.0),
            "loss_mask": policy.trained,
            "old_logprobs": policy.old,
            "loss_weights": policy.weights,
            "kl_weights": torch.where(responses.actions, self.controller.coef, 0.0),
            CHOSEN: responses.chosen,
        }
        return SequenceSample.from_default(
            ids=data.ids,
            seqlens=data.seqlens[SEQUENCES],
            data={key: rows[key] for key in rows if key in declared.needed},
            metadata=numbers,
        )
