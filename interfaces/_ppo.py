"""Every setting of PPO, once, with its only default. Actor and critic are given the same block of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits, check_limits
from rlcli.ops.kl import AdaptiveKLController, FixedKLController, KLController, KLEstimator


@dataclass(kw_only=True)
class PPOArgs:
    """The settings that actor and critic share: both compute the same rewards and returns from them."""

    READS: ClassVar[Declaration] = {"train_step": (
        "packed_input_ids", "prompt_mask", "packed_logprobs", "seq_no_eos_mask", "solved if given",
        "packed_ref_logprobs if kl_ctl", "values unless disable_value",
        "proximal_logprobs if use_decoupled_loss", "proximal_logprobs if recompute_logprob",
        "dense_rewards if use_dense_reward", "rewards unless use_dense_reward", "rewards if generation_size",
    )}  # fmt: skip

    LIMITS: ClassVar[Limits] = {
        "generation_size": {"ge": 1}, "minibatches": {"ge": 1}, "ppo_epochs": {"ge": 1},
        "discount": {"ge": 0, "le": 1}, "gae_lambda": {"ge": 0, "le": 1},
        "eps_clip": {"gt": 0}, "value_eps_clip": {"gt": 0}, "c_clip": {"gt": 1}, "behav_imp_weight_cap": {"gt": 1},
        "max_reward_clip": {"gt": 0}, "kl_ctl": {"ge": 0}, "entropy_coef": {"ge": 0},
        "adaptive_kl_target": {"gt": 0}, "adaptive_kl_horizon": {"gt": 0},
        "value_norm_beta": {"ge": 0, "lt": 1}, "value_norm_eps": {"gt": 0},
    }  # fmt: skip

    generation: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """How responses are sampled. Its temperature also divides the logits in training."""

    generation_size: int | None = None
    """Best of k: sample this many per prompt, train on the `responses_per_prompt` of highest reward."""

    minibatches: int = 4
    """Optimizer steps that one batch is spread over (per epoch)."""

    ppo_epochs: int = 1
    """Times that each response is trained on."""

    token_normalize_scope: Literal["global", "dp"] = "global"
    """What a loss is divided by: the tokens of all ranks (so their number does not matter), or each rank's."""

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

    eps_clip: float = 0.2
    """The policy's ratio counts within 1 ± this."""

    c_clip: float | None = None
    """Dual clip: the loss of a token with negative advantage is at most this times |advantage|; above 1."""

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

    entropy_coef: float = 0.0
    """Weight of an entropy bonus per token."""

    early_stop_imp_ratio: float | None = 5.0
    """Skip an optimizer step (weights, optimizer and schedule stay) if its mean importance ratio is above
    this."""

    early_stop_kl: float | None = None
    """Skip an optimizer step if the mean KL per token from the sampling policy is above this."""

    value_eps_clip: float = 0.2
    """The critic's prediction counts within ± this of its earlier one (in normalised units with
    `value_norm`)."""

    value_loss: Literal["mse", "huber"] = "mse"
    """Error of the critic: half the square, or Huber's with delta 10."""

    value_norm: bool = True
    """The critic learns returns normalised by their running mean and standard deviation."""

    value_norm_type: Literal["exp", "ma"] = "exp"
    """Running average: exponential with `value_norm_beta`, or over everything seen."""

    value_norm_beta: float = 0.99995
    """Decay per training step of the exponential average (corrected for its start at zero)."""

    value_norm_eps: float = 1e-5
    """Added to the variance of returns."""

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

    bootstrap_no_eos: bool = True
    """The critic's value of the last state of a response that was cut off stands for what would have
    followed. With a score for cut-off responses too, this adds to it; where most are cut off, values can run
    away: then false."""

    mask_too_long: bool = False
    """Responses that were cut off are not trained on."""

    use_dense_reward: bool = False
    """Use `dense_rewards` (a score after each token) in place of the one task reward at the end."""

    reward_delta: bool = True
    """With `use_dense_reward`: a token earns the change of the score, not the score."""

    def __post_init__(self) -> None:
        if isinstance(self.generation, Mapping):
            self.generation = GenerationHyperparameters(**self.generation)
        check_limits(self)
        self._check_choices()
        self._check_combinations()

    def _check_choices(self) -> None:
        choices = {
            "token_normalize_scope": ("global", "dp"),
            "value_loss": ("mse", "huber"),
            "value_norm_type": ("exp", "ma"),
            "kl_estimator": ("k1", "k2", "k3"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")

    def _check_combinations(self) -> None:
        group = self.generation.responses_per_prompt
        if self.behav_imp_weight_cap is not None and not self.use_decoupled_loss:
            raise ValueError("behav_imp_weight_cap has no effect without use_decoupled_loss: true")
        if self.adaptive_kl_ctl and self.kl_ctl == 0:
            raise ValueError("adaptive_kl_ctl multiplies kl_ctl, which is 0 and would stay 0")
        if self.generation_size is not None and self.generation_size <= group:
            raise ValueError(
                f"generation_size is {self.generation_size}; best of k needs more than "
                f"generation.responses_per_prompt, {group}"
            )
        if self.group_adv_norm and not self.adv_norm:
            raise ValueError("group_adv_norm says how adv_norm works; it has no effect with adv_norm: false")
        if self.group_adv_norm and group == 1:
            raise ValueError("group_adv_norm compares responses to one prompt: set generation.responses_per_prompt")

    def kl_controller(self) -> KLController:
        if self.adaptive_kl_ctl:
            return AdaptiveKLController(self.kl_ctl, self.adaptive_kl_target, self.adaptive_kl_horizon)
        return FixedKLController(self.kl_ctl)
