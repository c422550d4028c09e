"""The settings of reinforcement learning in parts. An interface inherits the parts that it uses, and nothing else.

A function asks for the part that it reads, and is given the interface. In a recipe the keys of all parts of an
interface are its `args:`, side by side.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.limits import Limits, check_limits
from rlcli.api.synonyms import Synonyms
from rlcli.ops.advantages import AdvantageEstimatorName
from rlcli.ops.kl import AdaptiveKLController, FixedKLController, KLController, KLEstimator
from rlcli.ops.policy_losses import LossAggregationName, PolicyLossName

TokenNormalizeScope = Literal["global", "dp"]
ValueLoss = Literal["mse", "huber"]
ValueNormType = Literal["exp", "ma"]


@dataclass(kw_only=True)
class Settings:
    """What every part begins with: its numbers are checked when it is made."""

    def __post_init__(self) -> None:
        check_limits(self)

    def _check_choice(self, name: str, allowed: Any) -> None:
        if getattr(self, name) not in get_args(allowed):
            choices = ", ".join(get_args(allowed))
            raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {choices}")


def named(functions: Mapping[str, Callable[..., Any]], name: str, settings: Settings) -> Callable[..., Any]:
    """The function of that name, with its keyword-only parameters taken from the settings of the same names."""
    function = functions[name]
    parameters = inspect.signature(function).parameters.values()
    own = {p.name: getattr(settings, p.name) for p in parameters if p.kind is p.KEYWORD_ONLY}
    return lambda *inputs: function(*inputs, **own)


@dataclass(kw_only=True)
class Sampling(Settings):
    """How responses are sampled, and which of them are trained on."""

    LIMITS: ClassVar[Limits] = {"generation_size": {"ge": 1}}
    SYNONYMS: ClassVar[Synonyms] = {
        "generation_size": "best_of best_of_n",
    }

    generation: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """How responses are sampled. Its temperature also divides the logits in training."""

    generation_size: int | None = None
    """Best of k: sample this many per prompt, train on the `responses_per_prompt` of highest reward."""

    def __post_init__(self) -> None:
        if isinstance(self.generation, Mapping):
            self.generation = GenerationHyperparameters(**self.generation)
        super().__post_init__()
        if self.generation_size is not None and self.generation_size <= self.generation.responses_per_prompt:
            raise ValueError(
                f"generation_size is {self.generation_size}; best of k needs more than "
                f"generation.responses_per_prompt, {self.generation.responses_per_prompt}"
            )

    @property
    def sampled_per_prompt(self) -> int:
        return self.generation_size or self.generation.responses_per_prompt


@dataclass(kw_only=True)
class OptimizerSteps(Settings):
    """How a batch is spread over optimizer steps."""

    LIMITS: ClassVar[Limits] = {"minibatches": {"ge": 1}, "ppo_epochs": {"ge": 1}}
    SYNONYMS: ClassVar[Synonyms] = {
        "minibatches": "ppo_n_minibatches num_mini_batches ppo_mini_batch_size mini_batch_size n_minibatches",
        "ppo_epochs": "num_ppo_epochs num_iterations ppo_epoch n_ppo_epochs max_epochs",
    }

    minibatches: int = 4
    """Optimizer steps that one batch is spread over (per epoch)."""

    ppo_epochs: int = 1
    """Times that each response is trained on."""

    token_normalize_scope: TokenNormalizeScope = "global"
    """What a loss is divided by: the tokens of all ranks (so their number does not matter), or each rank's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("token_normalize_scope", TokenNormalizeScope)


@dataclass(kw_only=True)
class OldPolicy(Settings):
    """Which log-probs stand for the policy that sampled, and for the one that ratios are taken to."""

    LIMITS: ClassVar[Limits] = {"behav_imp_weight_cap": {"gt": 1}}
    SYNONYMS: ClassVar[Synonyms] = {
        "behav_imp_weight_cap": "behave_imp_weight_cap rollout_is_threshold vllm_importance_sampling_cap",
    }

    use_decoupled_loss: bool = False
    """Clip around `proximal_logprobs` and weigh each token by proximal over behaviour policy. Needs a call
    `actor.inference` in the graph, with `packed_logprobs` renamed to `proximal_logprobs`. The KL penalty
    stays that of the behaviour policy, which sampled the responses."""

    recompute_logprob: bool = False
    """Take `proximal_logprobs`, of the trainer's own forward pass, as the old policy instead of the
    sampler's: for the ratio and, unless `use_decoupled_loss` is set too, for the KL penalty."""

    behav_imp_weight_cap: float | None = None
    """With `use_decoupled_loss`: tokens weighted above this leave the loss and the count it is divided by;
    above 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.behav_imp_weight_cap is not None and not self.use_decoupled_loss:
            raise ValueError("behav_imp_weight_cap has no effect without use_decoupled_loss: true")


@dataclass(kw_only=True)
class RewardShaping(Settings):
    """From scores and the distance from a reference to a reward for each token."""

    LIMITS: ClassVar[Limits] = {
        "kl_ctl": {"ge": 0}, "adaptive_kl_target": {"gt": 0}, "adaptive_kl_horizon": {"gt": 0},
        "max_reward_clip": {"gt": 0},
    }  # fmt: skip
    SYNONYMS: ClassVar[Synonyms] = {
        "kl_ctl": (
            "kl_coef kl_coeff init_kl_coef kl_loss_coef beta pref_beta reference_policy_kl_penalty kl_penalty_coef"
        ),
        "kl_estimator": "kl_penalty kl_loss_type kl_type use_kl_estimator_k3 reference_policy_kl_type",
        "adaptive_kl_ctl": "kl_ctrl.type adap_kl_ctrl adaptive_kl_coef use_adaptive_kl",
        "adaptive_kl_target": "kl_target target_kl ppo_target kl_ctrl.target adaptive_kl.target",
        "adaptive_kl_horizon": "kl_horizon kl_ctrl.horizon horizon",
        "reward_output_bias": "reward_bias",
        "reward_output_scaling": "reward_scaling reward_scale",
        "max_reward_clip": "reward_clip reward_clip_range cliprange_reward",
        "mask_too_long": "mask_truncated_completions overlong_filtering",
        "mask_no_eos_with_zero": "missing_eos_penalty",
    }

    kl_ctl: float = 0.1
    """Weight of the KL penalty per token (its starting value with `adaptive_kl_ctl`)."""

    kl_estimator: KLEstimator = "k1"
    """Estimate of the KL from the reference, per sampled token: k1, k2 or k3 (rlcli.ops.kl). It is that of
    the policy that sampled the responses; see `recompute_logprob`."""

    adaptive_kl_ctl: bool = False
    """Steer the weight of the KL penalty towards `adaptive_kl_target`."""

    adaptive_kl_target: float = 6.0
    """KL per response, in nats, that the adaptive controller aims at."""

    adaptive_kl_horizon: float = 10000.0
    """Responses over which the adaptive controller reacts."""

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

    use_dense_reward: bool = False
    """Use `dense_rewards` (a score after each token) in place of the one task reward at the end."""

    reward_delta: bool = True
    """With `use_dense_reward`: a token earns the change of the score, not the score."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("kl_estimator", KLEstimator)
        if self.adaptive_kl_ctl and self.kl_ctl == 0:
            raise ValueError("adaptive_kl_ctl multiplies kl_ctl, which is 0 and would stay 0")

    def kl_controller(self) -> KLController:
        if self.adaptive_kl_ctl:
            return AdaptiveKLController(self.kl_ctl, self.adaptive_kl_target, self.adaptive_kl_horizon)
        return FixedKLController(self.kl_ctl)


@dataclass(kw_only=True)
class Advantages(Settings):
    """How much better than expected an action was."""

    LIMITS: ClassVar[Limits] = {"discount": {"ge": 0, "le": 1}, "gae_lambda": {"ge": 0, "le": 1}}
    SYNONYMS: ClassVar[Synonyms] = {
        "advantage_estimator": "adv_estimator advantage_type",
        "gae_lambda": "lam lambd lmbda gae_lam",
        "discount": "gamma",
        "adv_norm": "whiten_advantages whiten_rewards normalize_advantages advantage_normalization",
        "group_adv_norm": "norm_adv_by_std_in_grpo scale_rewards",
    }

    advantage_estimator: AdvantageEstimatorName = "gae"
    """gae: from the values of a critic. grpo: a response against the others to its prompt, without a critic
    (`disable_value: true`); published without `adv_norm`."""

    discount: float = 1.0
    """Discount factor per token."""

    gae_lambda: float = 1.0
    """Bias against variance of advantages: 1 waits for the final reward, 0 trusts the critic's next value."""

    adv_norm: bool = True
    """Normalise advantages to mean 0 and standard deviation 1 over the batch."""

    group_adv_norm: bool = False
    """Normalise advantages over the tokens of the responses to one prompt, instead of over the batch."""

    disable_value: bool = False
    """Do without a critic: all values are 0, advantages are the discounted rewards to come."""

    bootstrap_no_eos: bool = True
    """The critic's value of the last state of a response that was cut off stands for what would have
    followed. With a score for cut-off responses too, this adds to it; where most are cut off, values can run
    away: then false."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("advantage_estimator", AdvantageEstimatorName)
        if self.group_adv_norm and not self.adv_norm:
            raise ValueError("group_adv_norm says how adv_norm works; it has no effect with adv_norm: false")
        if self.advantage_estimator == "grpo" and not self.disable_value:
            raise ValueError("advantage_estimator: grpo uses no values; set disable_value: true")

    @property
    def compares_groups(self) -> bool:
        """Whether a single response to a prompt would say nothing."""
        return self.group_adv_norm or self.advantage_estimator == "grpo"


@dataclass(kw_only=True)
class PolicyLoss(Settings):
    """What the policy minimises, and when an optimizer step is skipped."""

    LIMITS: ClassVar[Limits] = {"eps_clip": {"gt": 0}, "c_clip": {"gt": 1}, "entropy_coef": {"ge": 0}}
    SYNONYMS: ClassVar[Synonyms] = {
        "policy_loss": "policy_loss_type loss_mode policy_loss_fn",
        "loss_aggregation": "loss_agg_mode loss_type",
        "eps_clip": (
            "clip_range cliprange clip_ratio epsilon epsilon_high clip_ratio_low clip_ratio_high clip_eps "
            "ratio_clip_min ratio_clip_max eps_clip_higher eps_clip_low_high"
        ),
        "c_clip": "clip_ratio_c dual_clip ratio_clip_c delta",
        "entropy_coef": "entropy_coeff ent_coef entropy_loss_coef entropy_bonus",
    }

    policy_loss: PolicyLossName = "ppo"
    """ppo: each token's ratio is clipped. gspo: one ratio for a whole response, clipped as one (try `eps_clip:
    3e-4` and `loss_aggregation: sequence`)."""

    loss_aggregation: LossAggregationName = "token"
    """token: every token counts alike, so long responses count for more. sequence: every response counts
    alike."""

    eps_clip: float = 0.2
    """The policy's ratio counts within 1 ± this."""

    c_clip: float | None = None
    """Dual clip: the loss of a token with negative advantage is at most this times |advantage|; above 1."""

    entropy_coef: float = 0.0
    """Weight of an entropy bonus per token."""

    early_stop_imp_ratio: float | None = 5.0
    """Skip an optimizer step (weights, optimizer and schedule stay) if its mean importance ratio is above
    this."""

    early_stop_kl: float | None = None
    """Skip an optimizer step if the mean KL per token from the sampling policy is above this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("policy_loss", PolicyLossName)
        self._check_choice("loss_aggregation", LossAggregationName)
        if self.c_clip is not None and self.policy_loss != "ppo":
            raise ValueError(f"c_clip has no effect with policy_loss: {self.policy_loss}")

    def may_step(self, stats: Mapping[str, float]) -> bool:
        """Whether the means of an optimizer step are within the limits."""
        ratio, kl = self.early_stop_imp_ratio, self.early_stop_kl
        return not (
            (ratio is not None and stats["importance_ratio"] > ratio) or (kl is not None and stats["approx_kl"] > kl)
        )


@dataclass(kw_only=True)
class CriticLoss(Settings):
    """What the critic minimises, and the units in which it learns."""

    LIMITS: ClassVar[Limits] = {
        "value_eps_clip": {"gt": 0}, "value_norm_beta": {"ge": 0, "lt": 1}, "value_norm_eps": {"gt": 0},
    }  # fmt: skip
    SYNONYMS: ClassVar[Synonyms] = {
        "value_eps_clip": "cliprange_value value_clip value_clip_range vf_clip",
    }

    value_eps_clip: float = 0.2
    """The critic's prediction counts within ± this of its earlier one (in normalised units with
    `value_norm`)."""

    value_loss: ValueLoss = "mse"
    """Error of the critic: half the square, or Huber's with delta 10."""

    value_norm: bool = True
    """The critic learns returns normalised by their running mean and standard deviation."""

    value_norm_type: ValueNormType = "exp"
    """Running average: exponential with `value_norm_beta`, or over everything seen."""

    value_norm_beta: float = 0.99995
    """Decay per training step of the exponential average (corrected for its start at zero)."""

    value_norm_eps: float = 1e-5
    """Added to the variance of returns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("value_loss", ValueLoss)
        self._check_choice("value_norm_type", ValueNormType)
