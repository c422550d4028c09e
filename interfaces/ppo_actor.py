"""A policy: samples responses, recomputes their log-probs, trains on their advantages. PPO's,
and GRPO's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.key_meaning import REFERENCE, SEQUENCES
from rlcli.api.limits import ArgumentCheck, Limits, Needs
from rlcli.api.metrics import Metrics
from rlcli.api.micro_batches import Cut
from rlcli.api.model import (
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Stats,
    register_interface,
)
from rlcli.api.synonyms import Synonyms
from rlcli.ops.kl import KLEstimator, KLGradient, kl_loss
from rlcli.ops.policy_losses import (
    LOSS_AGGREGATIONS,
    POLICY_LOSSES,
    Actions,
    LossAggregationName,
    LossesAndSums,
    PolicyLossName,
)

from ._logprobs import recompute_logprobs
from ._named import named
from ._optimizer_steps import OptimizerSteps, optimizer_steps
from ._policy_distances import actions_of, distances_at_first, distances_before
from ._responses import as_generation, imitate_responses, sample_responses
from ._sequences import chosen_sequences


@dataclass(kw_only=True)
class PPOActorInterface(OptimizerSteps, ModelInterface):
    """Generates responses and trains the policy on advantages that another call computes: `gae`,
    `group_relative`."""

    READS: ClassVar[Declaration] = {
        "generate": ("packed_prompts",),
        "inference": (
            "packed_input_ids",
            "prompt_mask if given",
            "routed_experts if generation.routing_replay",
        ),
        "train_step": (
            "packed_input_ids",
            "prompt_mask",
            "packed_logprobs",
            "advantages",
            "loss_mask",
            "old_logprobs",
            "loss_weights if given",
            "kl_weights if given",
            "chosen if given",
            "packed_ref_logprobs if given",
            "proximal_logprobs if given",
            "routed_experts if generation.routing_replay",
        ),
    }
    WRITES: ClassVar[Declaration] = {
        "generate": (
            "packed_input_ids",
            "prompt_mask",
            "packed_logprobs",
            "seq_no_eos_mask",
            "routed_experts if generation.routing_replay",
        ),
        "inference": ("packed_logprobs",),
    }
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",), "inference": ("lm",)}
    PREPARED_BY: ClassVar[Mapping[str, str]] = {"train_step": "gae"}
    REPLACES: ClassVar[Mapping[str, Any]] = {
        "grpo": {"prepared_by": "group_relative", "args": {"loss_aggregation": "sequence"}}
    }
    COUNTS_LEFT_OUT: ClassVar[Declaration] = {
        "train_step": ("sequences if loss_aggregation=constant",)
    }
    NO_EFFECT_WITHOUT: ClassVar[Mapping[str, str]] = {"kl_gradient": "kl_weights"}
    CUT: ClassVar[Cut] = "sequence"
    LIMITS: ClassVar[Limits] = {
        "eps_clip": {"gt": 0, "le": 1},
        "eps_clip_high": {"gt": 0},
        "c_clip": {"gt": 1},
        "entropy_coef": {"ge": 0},
        "loss_constant": {"gt": 0},
        "tau_pos": {"gt": 0},
        "tau_neg": {"gt": 0},
    }
    ARGUMENT_CHECK: ClassVar[ArgumentCheck] = None
    NEEDS: ClassVar[Needs] = {
        "eps_clip": "policy_loss=ppo|gspo|cispo|sequence|dppo_tv|dppo_kl",
        "eps_clip_high": "policy_loss=ppo|gspo|cispo|sequence|dppo_tv|dppo_kl",
        "c_clip": "policy_loss=ppo",
        "tau_pos": "policy_loss=sapo",
        "tau_neg": "policy_loss=sapo",
        "loss_constant": "loss_aggregation=constant",
        "loss_aggregation=constant": "loss_constant",
    }
    SYNONYMS: ClassVar[Synonyms] = {
        "policy_loss": (
            "policy_loss_type loss_mode policy_loss_fn importance_sampling_level divergence_type"
        ),
        "loss_aggregation": "loss_agg_mode loss_type",
        "eps_clip": (
            "clip_range cliprange clip_ratio epsilon epsilon_low clip_ratio_low clip_eps "
            "ratio_clip_min eps_clip_low_high"
        ),
        "eps_clip_high": (
            "epsilon_high clip_ratio_high clip_eps_high eps_clip_higher ratio_clip_max"
        ),
        "c_clip": "clip_ratio_c dual_clip ratio_clip_c delta",
        "tau_pos": "sapo_temperature_pos sapo_tau_pos",
        "tau_neg": "sapo_temperature_neg sapo_tau_neg",
        "entropy_coef": "entropy_coeff ent_coef entropy_loss_coef entropy_bonus",
    }
    METRICS: ClassVar[Metrics] = {
        "kl": (
            "nats per token",
            (
                "KL of the policy as the step begins from the reference: k3, weighted by "
                "how much likelier a token is than under the policy that sampled it; mean "
                "over the tokens of responses"
            ),
        ),
        "sampler_gap": (
            "nats per token",
            "mean distance of the trainer's log-probs from the sampler's where both have "
            "the same weights: how much their engines differ",
        ),
        "policy_drift": (
            "nats per token",
            "mean distance of the trainer's log-probs from the sampler's where samples "
            "are of older weights: how far training has moved the policy since",
        ),
        "importance_ratio": (
            "ratio",
            "mean ratio of the policy to the old one, over the trained tokens",
        ),
        "approx_kl": (
            "nats per token",
            "KL of the old policy from the policy (k1), mean over the trained tokens",
        ),
        "clip_fraction": (
            "share",
            "share of trained tokens whose ratio is clipped; for dppo, that are left out",
        ),
        "dual_clip_fraction": ("share", "share of trained tokens whose loss c_clip bounds"),
        "entropy": ("nats per token", "entropy of the policy, mean over the trained tokens"),
        "kl_penalty": (
            "nats per token",
            "KL penalty in the loss before its weight, mean over the trained tokens",
        ),
    }

    generation: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """How responses are sampled. The temperature also divides the logits in training."""

    policy_loss: PolicyLossName = "ppo"
    """ppo: each token's ratio is clipped. gspo: one ratio per response, the geometric mean of its
    tokens' ratios (try `eps_clip: 3e-4` and `loss_aggregation: sequence`). cispo: clipped ratios
    only weight the log-probs, so no token loses its gradient. sequence: a response is a single
    action, with the product of its tokens' ratios (RLOO: with `loss_aggregation: constant` and
    `loss_constant: 1`, or with `loss_aggregation: sequence`). sapo: no clip, but a sigmoid that
    flattens the objective away from a ratio of 1 (`tau_pos`, `tau_neg`). dppo_tv, dppo_kl: a token
    is left out once its probability has moved too far from that of the old policy, in total
    variation or KL (`eps_clip`)."""

    loss_aggregation: LossAggregationName = "token"
    """token: every token has the same weight, so long responses have more influence. sequence:
    every response has the same weight. constant: every token has the same weight, and the sum is
    divided by `loss_constant` times the number of responses."""

    loss_constant: float | None = None
    """With `loss_aggregation: constant`: the number of tokens per response to divide the loss by,
    such as `${generation.max_new_tokens}`."""

    eps_clip: float = 0.2
    """Clip the policy's ratio at 1 minus this and, unless `eps_clip_high` is set, at 1 plus this.
    With dppo_tv and dppo_kl: the largest divergence of a token that becomes less likely."""

    eps_clip_high: float | None = None
    """Clip the policy's ratio at 1 plus this ("clip-higher" if it is above `eps_clip`); null: same
    as `eps_clip`. With dppo_tv and dppo_kl: the largest divergence of a token that becomes
    likelier."""

    c_clip: float | None = None
    """Dual clip: the loss of a token with negative advantage is at most this times |advantage|;
    above 1."""

    tau_pos: float | None = None
    """With `policy_loss: sapo`: how fast the gradient of a token with positive advantage fades as
    its ratio leaves 1; null: 1.0."""

    tau_neg: float | None = None
    """With `policy_loss: sapo`: the same of a token with negative advantage, whose gradient is less
    stable; null: 1.05."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus per token."""

    kl_estimator: KLEstimator = "k3"
    """Estimator of a KL penalty in the loss, where the call that computes advantages asks for one
    (`kl_in: loss`)."""

    kl_gradient: KLGradient = "reverse"
    """Gradient of this penalty. reverse: that of the KL of the policy from the reference, whichever
    `kl_estimator` gives the value; tokens are weighted by their ratio to the sampling policy.
    naive: that of the estimator itself, which is zero for k1 and that of a different KL for k3."""

    early_stop_imp_ratio: float | None = 5.0
    """Skip an optimizer step (weights, optimizer and schedule stay unchanged) if its mean
    importance ratio exceeds this."""

    early_stop_kl: float | None = None
    """Skip an optimizer step if the mean KL per token from the old policy exceeds this: the one
    that sampled or, with a decoupled loss, the one that the training step began with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.generation = as_generation(self.generation)

    def generate(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_prompts` → `packed_input_ids`, `prompt_mask`, `packed_logprobs`,
        `seq_no_eos_mask`."""
        return sample_responses(model, data, self.generation)

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids` → `packed_logprobs` under the current weights."""
        return recompute_logprobs(
            model, data, mb_spec, "packed_logprobs", self.generation.temperature
        )

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """`ppo_epochs` times `minibatches` optimizer steps on one batch of responses."""
        batch = chosen_sequences(data)
        before = distances_before(batch, model.all_reduce)
        stats = optimizer_steps(
            self,
            model,
            batch,
            self._loss,
            self._loss_weight,
            mb_spec,
            step_if=self.may_step,
            cut=self.CUT,
        )
        return stats | before

    def may_step(self, stats: Mapping[str, float]) -> bool:
        """Whether the means of an optimizer step are within the limits."""
        limits = {"importance_ratio": self.early_stop_imp_ratio, "approx_kl": self.early_stop_kl}
        means = dict.fromkeys(limits, 0.0) | {**stats}  # those of no tokens are not there
        return not any(limit is not None and means[name] > limit for name, limit in limits.items())

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """Responses made of words from their prompts."""
        if interface_type != "generate":
            return super().mock(interface_type, model, data)
        return imitate_responses(model, data, self.generation)

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        """The sum over a micro-batch of the policy's loss, the entropy bonus and a KL penalty; the
        engine divides by the weight of the whole step."""
        tensors, mask = batch.data, batch.data["loss_mask"]
        output.temperature = self.generation.temperature
        output.actions = actions_of(batch) | mask
        # before the log-probs: one pass over the vocabulary gives both
        entropy = output.entropy[mask]
        columns = (output.logprobs, tensors["old_logprobs"], tensors["advantages"])
        actions = Actions(*columns, mask, batch.flat_seqlens(SEQUENCES))
        losses, sums = self._losses(actions, entropy, batch)
        means = {name: (total, mask.count_nonzero()) for name, total in sums.items()}
        shares, _ = self._shares(batch)
        return (losses * shares).sum(), means | distances_at_first(actions.logprobs, batch)

    def _losses(
        self, actions: Actions, entropy: torch.Tensor, batch: SequenceSample
    ) -> LossesAndSums:
        """The loss of each of the M trained actions, given their entropy [M]; and numbers, each
        summed over them."""
        tensors, mask = batch.data, actions.mask
        losses, sums = named(POLICY_LOSSES, self.policy_loss, self)(actions)
        sums["entropy"] = entropy.detach().sum()
        if "loss_weights" in batch.keys:
            losses = losses * tensors["loss_weights"][mask]
        if self.entropy_coef:
            losses = losses - self.entropy_coef * entropy
        if "kl_weights" in batch.keys and REFERENCE in batch.keys:
            penalty = self._kl_penalty(actions, tensors[REFERENCE])
            losses = losses + self._kl_weights(batch) * penalty
            sums["kl_penalty"] = penalty.detach().sum()
        return losses, sums

    def _kl_penalty(self, actions: Actions, reference: torch.Tensor) -> torch.Tensor:
        """[M] the KL from the reference of each trained action."""
        mask = actions.mask
        logprobs, old_logprobs = actions.logprobs[mask], actions.old_logprobs[mask]
        return kl_loss(logprobs, old_logprobs, reference[mask], self.kl_estimator, self.kl_gradient)

    def _kl_weights(self, batch: SequenceSample) -> torch.Tensor:
        """[M] the weight of the penalty of each trained action. Its reverse gradient is an
        expectation over the policy's own tokens: as their ratio to the old policy is in it, that of
        the old policy to the sampler, by which the loss is weighted, belongs here."""
        weights = batch.data["kl_weights"]
        if self.kl_gradient == "reverse" and "loss_weights" in batch.keys:
            weights = weights * batch.data["loss_weights"]
        return weights[batch.data["loss_mask"]]

    def _loss_weight(self, batch: SequenceSample) -> torch.Tensor:
        """The divisor of the sum over all micro-batches and ranks."""
        return self._shares(batch)[1]

    def _shares(self, batch: SequenceSample) -> tuple[torch.Tensor, torch.Tensor]:
        """(the weight of each trained action [M], their total weight),
        as `loss_aggregation` says."""
        aggregate = named(LOSS_AGGREGATIONS, self.loss_aggregation, self)
        weights: tuple[torch.Tensor, torch.Tensor] = aggregate(
            batch.data["loss_mask"], batch.flat_seqlens(SEQUENCES)
        )
        return weights


register_interface("ppo_actor", PPOActorInterface)
