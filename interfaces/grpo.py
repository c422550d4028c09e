"""Critic-less policy gradients: a response is rated relative to others. GRPO and its family."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.key_meaning import PLACE
from rlcli.api.metrics import Metrics
from rlcli.api.model import MicroBatchSpec, Model, ModelOutput, Stats, register_interface
from rlcli.ops.kl import KLEstimator, kl_loss
from rlcli.ops.policy_losses import LossAggregationName

from ._policy import Policy
from ._policy_loss import aggregated, at_first, policy_losses, taken_actions
from ._rollout import batch_stats, equal_groups, prepare, proximal_gaps, reduce_over
from ._rollout_settings import KLPlacement, RelativeAdvantages

log = logging.getLogger(__name__)

WARN_EVERY = 10
"""Steps without a learning signal between two warnings."""


@dataclass(kw_only=True)
class GRPOInterface(KLPlacement, RelativeAdvantages, Policy):
    """Generates groups of responses and trains the policy on how each compares with its group, without a critic.

    The defaults are GRPO as published (arXiv:2402.03300). The profiles dr_grpo, rloo, dapo and gspo are other settings
    of the same parts.
    """

    READS: ClassVar[Declaration] = {"train_step": (
        "packed_input_ids", "prompt_mask", "packed_logprobs", "seq_no_eos_mask",
        "packed_ref_logprobs if kl_ctl",
        "proximal_logprobs if use_decoupled_loss", "proximal_logprobs if recompute_logprob",
        "dense_rewards if use_dense_reward", "rewards unless use_dense_reward", "rewards if generation_size",
    )}  # fmt: skip

    NEEDS_GROUP: ClassVar[Declaration] = {
        "train_step": ("2 if baseline=group", "2 if baseline=leave_one_out", "2 if scale=group")
    }
    METRICS: ClassVar[Metrics] = {
        "equal_rewards_fraction": ("share", "share of prompts whose responses all have the same reward"),
        "kl_penalty": ("nats per token", "KL penalty in the loss before kl_coef, mean over the trained tokens"),
    }

    generation: GenerationHyperparameters = field(
        default_factory=lambda: GenerationHyperparameters(responses_per_prompt=8)
    )
    """How responses are sampled, `responses_per_prompt` of them per group. The temperature also divides the logits in
    training."""

    kl_ctl: float = 0.04
    """Weight of the KL penalty per token (its starting value with `adaptive_kl_ctl`); 0: needs no reference."""

    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL from the reference, per sampled token: k1, k2 or k3 (rlcli.ops.kl)."""

    adv_norm: bool = False
    """Additionally normalise advantages to mean 0 and standard deviation 1 over the batch's tokens (REINFORCE++)."""

    loss_aggregation: LossAggregationName = "sequence"
    """sequence: every response counts alike. token: every token counts alike, so long responses count for more.
    constant: tokens count alike, and their sum is divided by `loss_constant` times the number of responses."""

    steps_without_signal: int = field(init=False, default=0, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compares_groups and self.generation.responses_per_prompt == 1:
            message = f"baseline: {self.baseline} with scale: {self.scale} compares responses to one prompt"
            raise ValueError(f"{message}: set generation.responses_per_prompt above 1")

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """`ppo_epochs` times `minibatches` optimizer steps on one batch of responses."""
        reduce = reduce_over(model)
        batch = prepare(self, data, self.controller.coef if self.kl_in == "reward" else 0.0, reduce)
        equal = equal_groups(batch, reduce)
        of_batch = batch_stats(self, batch, reduce) | equal | proximal_gaps(self, data, reduce)
        self._warn_without_signal(equal["equal_rewards_fraction"], data)
        return self._take_steps(model, batch, mb_spec, reduce) | of_batch

    def _warn_without_signal(self, equal_rewards: float, data: SequenceSample) -> None:
        """Warn in the first of consecutive steps in which no group has a better response, and in every tenth."""
        has_no_signal = self.compares_groups and equal_rewards == 1
        self.steps_without_signal = self.steps_without_signal + 1 if has_no_signal else 0
        if self.steps_without_signal % WARN_EVERY == 1 and 0 in data.metadata.get(PLACE, [0]):
            log.warning(
                "all responses to each prompt have the same reward, so this step learns nothing from them (%d in a "
                "row); look at them with rlcli samples, and start from a model that solves some, "
                "or ask easier questions",
                self.steps_without_signal,
            )

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        """The policy loss and, with `kl_in: loss`, the KL penalty."""
        actions, entropy = taken_actions(self, output, batch)
        losses, stats = policy_losses(self, actions, entropy, batch)
        if self.kl_ctl and self.kl_in == "loss":
            columns = (actions.logprobs, actions.old_logprobs, batch.data["ref_logprobs"])
            logprobs, old_logprobs, ref_logprobs = (column[actions.mask] for column in columns)
            penalty = kl_loss(logprobs, old_logprobs, ref_logprobs, self.kl_estimator, self.kl_gradient)
            losses = losses + self.controller.coef * penalty
            stats["kl_penalty"] = penalty.detach().sum()
        loss, means = aggregated(self, losses, stats, batch)
        return loss, {**means, **at_first(self, actions, batch)}


register_interface("grpo", GRPOInterface)
