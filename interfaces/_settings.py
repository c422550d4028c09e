"""Reinforcement-learning settings, split into parts. An interface inherits the parts that it uses, and no others.

Here: how responses are sampled and how a model is updated; `_rollout_settings` has what comes in between. A function
takes the part that it reads, and is passed the interface. In a recipe the keys of all parts of an interface are its
`args:`, side by side.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.limits import Limits
from rlcli.api.synonyms import Synonyms
from rlcli.ops.policy_losses import BehaviourWeightMode, LossAggregationName, PolicyLossName

from ._checked import Settings

TokenNormalizeScope = Literal["global", "dp"]
ValueLoss = Literal["mse", "huber"]
ValueNormType = Literal["exp", "ma"]


def named(functions: Mapping[Any, Callable[..., Any]], name: str, settings: Settings) -> Callable[..., Any]:
    """The function of that name, with its keyword-only parameters bound to the settings of the same names."""
    function = functions[name]
    parameters = inspect.signature(function).parameters.values()
    bound = {p.name: getattr(settings, p.name) for p in parameters if p.kind is p.KEYWORD_ONLY}
    return lambda *inputs: function(*inputs, **bound)


@dataclass(kw_only=True)
class Generation(Settings):
    """How responses are sampled."""

    generation: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """How responses are sampled. Where they are trained on, the temperature also divides the logits in training."""

    def __post_init__(self) -> None:
        if isinstance(self.generation, Mapping):
            self.generation = GenerationHyperparameters(**self.generation)
        super().__post_init__()

    @property
    def sampling(self) -> GenerationHyperparameters:
        """`generation`, with `responses_per_prompt` counting all sampled responses."""
        return self.generation


@dataclass(kw_only=True)
class Sampling(Generation):
    """How responses are sampled, and which of them are trained on."""

    LIMITS: ClassVar[Limits] = {"generation_size": {"ge": 1, "le": 100_000}}
    SYNONYMS: ClassVar[Synonyms] = {
        "generation_size": "best_of best_of_n",
    }

    generation_size: int | None = None
    """Best of k: sample this many per prompt, and train on the `responses_per_prompt` with the highest reward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generation_size is not None and self.generation_size <= self.generation.responses_per_prompt:
            raise ValueError(
                f"generation_size is {self.generation_size}; best of k needs more than "
                f"generation.responses_per_prompt, {self.generation.responses_per_prompt}"
            )

    @property
    def sampling(self) -> GenerationHyperparameters:
        """`generation`, with `responses_per_prompt` counting all sampled responses."""
        sampled = self.generation_size or self.generation.responses_per_prompt
        return replace(self.generation, responses_per_prompt=sampled)


@dataclass(kw_only=True)
class OptimizerSteps(Settings):
    """How a batch is split over optimizer steps."""

    LIMITS: ClassVar[Limits] = {"minibatches": {"ge": 1}, "ppo_epochs": {"ge": 1, "le": 1000}}
    SYNONYMS: ClassVar[Synonyms] = {
        "minibatches": "ppo_n_minibatches num_mini_batches ppo_mini_batch_size mini_batch_size n_minibatches",
        "ppo_epochs": "num_ppo_epochs num_iterations ppo_epoch n_ppo_epochs max_epochs",
    }

    minibatches: int = 4
    """Number of optimizer steps that a batch is split into (per epoch)."""

    ppo_epochs: int = 1
    """Number of times each response is trained on."""

    token_normalize_scope: TokenNormalizeScope = "global"
    """Divisor of the loss: the tokens of all ranks (so the number of ranks does not matter), or each rank's own."""


@dataclass(kw_only=True)
class OldPolicy(Settings):
    """Which log-probs represent the sampling policy, and which the policy that ratios are taken to."""

    LIMITS: ClassVar[Limits] = {"behav_imp_weight_cap": {"gt": 1}}
    SYNONYMS: ClassVar[Synonyms] = {
        "behav_imp_weight_cap": (
            "behave_imp_weight_cap rollout_is_threshold vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
            "tis_imp_ratio_cap"
        ),
        "behav_imp_weight_mode": "behave_imp_weight_mode rollout_is vllm_importance_sampling_mode",
    }

    use_decoupled_loss: bool = False
    """Clip around `proximal_logprobs` and weight each token by proximal over behaviour policy. Requires an
    `actor.inference` call in the graph, with `packed_logprobs` renamed to `proximal_logprobs`. The KL penalty
    stays that of the behaviour policy, which sampled the responses."""

    recompute_logprob: bool = False
    """Use `proximal_logprobs`, from the trainer's own forward pass, as the old policy instead of the
    sampler's: for the ratio and, unless `use_decoupled_loss` is also set, for the KL penalty."""

    behav_imp_weight_cap: float | None = None
    """With `use_decoupled_loss`: maximum weight of a token; above 1."""

    behav_imp_weight_mode: BehaviourWeightMode = "mask"
    """How to treat a token weighted above the cap. mask: it is dropped from the loss and from the count that divides
    it. truncate: it is weighted by the cap (truncated importance sampling, TIS)."""

    @property
    def uses_proximal_logprobs(self) -> bool:
        """Whether the trainer recomputes the log-probs of sampled responses before training on them."""
        return self.use_decoupled_loss or self.recompute_logprob

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.behav_imp_weight_mode == "truncate" and self.behav_imp_weight_cap is None:
            raise ValueError("behav_imp_weight_mode: truncate needs behav_imp_weight_cap")
        if self.behav_imp_weight_cap is not None and not self.use_decoupled_loss:
            raise ValueError("behav_imp_weight_cap has no effect without use_decoupled_loss: true")


@dataclass(kw_only=True)
class PolicyLoss(Settings):
    """The policy's objective, and when an optimizer step is skipped."""

    LIMITS: ClassVar[Limits] = {
        "eps_clip": {"gt": 0, "le": 1}, "eps_clip_high": {"gt": 0}, "c_clip": {"gt": 1}, "entropy_coef": {"ge": 0},
        "loss_constant": {"gt": 0},
    }  # fmt: skip
    SYNONYMS: ClassVar[Synonyms] = {
        "policy_loss": "policy_loss_type loss_mode policy_loss_fn importance_sampling_level",
        "loss_aggregation": "loss_agg_mode loss_type",
        "eps_clip": (
            "clip_range cliprange clip_ratio epsilon epsilon_low clip_ratio_low clip_eps ratio_clip_min "
            "eps_clip_low_high"
        ),
        "eps_clip_high": "epsilon_high clip_ratio_high clip_eps_high eps_clip_higher ratio_clip_max",
        "c_clip": "clip_ratio_c dual_clip ratio_clip_c delta",
        "entropy_coef": "entropy_coeff ent_coef entropy_loss_coef entropy_bonus",
    }

    policy_loss: PolicyLossName = "ppo"
    """ppo: each token's ratio is clipped. gspo: one ratio per response, the geometric mean of its tokens' ratios (try
    `eps_clip: 3e-4` and `loss_aggregation: sequence`). cispo: clipped ratios only weight the log-probs, so no token
    loses its gradient. sequence: a response is a single action, with the product of its tokens' ratios (RLOO: with
    `loss_aggregation: constant` and `loss_constant: 1`)."""

    loss_aggregation: LossAggregationName = "token"
    """token: every token counts alike, so long responses count for more. sequence: every response counts
    alike. constant: tokens count alike, and their sum is divided by `loss_constant` times the number of responses."""

    loss_constant: float | None = None
    """With `loss_aggregation: constant`: the number of tokens per response to divide the loss by, such as
    `${generation.max_new_tokens}`."""

    eps_clip: float = 0.2
    """Clip the policy's ratio at 1 minus this and, unless `eps_clip_high` is set, at 1 plus this."""

    eps_clip_high: float | None = None
    """Clip the policy's ratio at 1 plus this ("clip-higher" if it is above `eps_clip`); null: same as `eps_clip`."""

    c_clip: float | None = None
    """Dual clip: the loss of a token with negative advantage is at most this times |advantage|; above 1."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus per token."""

    early_stop_imp_ratio: float | None = 5.0
    """Skip an optimizer step (weights, optimizer and schedule stay unchanged) if its mean importance ratio exceeds
    this."""

    early_stop_kl: float | None = None
    """Skip an optimizer step if the mean KL per token from the sampling policy exceeds this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.loss_constant is not None) != (self.loss_aggregation == "constant"):
            raise ValueError("loss_aggregation: constant divides by loss_constant: set both, or neither")
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
    """The critic's objective, and the units in which it learns."""

    LIMITS: ClassVar[Limits] = {
        "value_eps_clip": {"gt": 0}, "value_norm_beta": {"ge": 0, "lt": 1}, "value_norm_eps": {"gt": 0},
    }  # fmt: skip
    SYNONYMS: ClassVar[Synonyms] = {
        "value_eps_clip": "cliprange_value value_clip value_clip_range vf_clip",
    }

    value_eps_clip: float = 0.2
    """Clip the critic's prediction to within ± this of its earlier one (in normalised units with
    `value_norm`)."""

    value_loss: ValueLoss = "mse"
    """Error of the critic: half the squared error, or Huber with delta 10."""

    value_norm: bool = True
    """Train the critic on returns normalised by their running mean and standard deviation."""

    value_norm_type: ValueNormType = "exp"
    """Running average: exponential with `value_norm_beta`, or over all returns so far."""

    value_norm_beta: float = 0.99995
    """Decay per training step of the exponential average (corrected for its start at zero)."""

    value_norm_eps: float = 1e-5
    """Added to the variance of returns."""
