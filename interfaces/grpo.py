"""Critic-less policy gradients: a response is as good as it is better than others. GRPO and its family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.micro_batches import Cut
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, Stats, register_interface
from rlcli.interfaces._logprobs import recompute_logprobs
from rlcli.interfaces._optimizer_steps import optimizer_steps
from rlcli.interfaces._policy_loss import PolicySettings, aggregated, loss_weight, policy_losses, taken_actions
from rlcli.interfaces._responses import imitate_responses, sample_responses
from rlcli.interfaces._rollout import batch_stats, equal_groups, prepare, reduce_over, response_kl
from rlcli.interfaces._rollout_settings import KLPlacement, RelativeAdvantages
from rlcli.interfaces._settings import OptimizerSteps
from rlcli.ops.kl import KLController, KLEstimator, kl_loss
from rlcli.ops.policy_losses import LossAggregationName


@dataclass(kw_only=True)
class GRPOInterface(KLPlacement, PolicySettings, OptimizerSteps, RelativeAdvantages, ModelInterface):
    """Generates groups of responses and trains the policy on how each compares with its group, without a critic.

    The defaults are GRPO as published (arXiv:2402.03300). The profiles dr_grpo, rloo, dapo and gspo are other settings
    of the same parts.
    """

    READS: ClassVar[Declaration] = {
        "generate": ("packed_prompts",),
        "inference": ("packed_input_ids", "prompt_mask if given"),
        "train_step": (
            "packed_input_ids", "prompt_mask", "packed_logprobs", "seq_no_eos_mask", "solved if given",
            "packed_ref_logprobs if kl_ctl",
            "proximal_logprobs if use_decoupled_loss", "proximal_logprobs if recompute_logprob",
            "dense_rewards if use_dense_reward", "rewards unless use_dense_reward", "rewards if generation_size",
        ),
    }  # fmt: skip
    WRITES: ClassVar[Declaration] = {
        "generate": ("packed_input_ids", "prompt_mask", "packed_logprobs", "seq_no_eos_mask"),
        "inference": ("packed_logprobs",),
    }

    CUT: ClassVar[Cut] = "sequence"  # groups are compared before the loss, which looks at one sequence at a time

    generation: GenerationHyperparameters = field(
        default_factory=lambda: GenerationHyperparameters(responses_per_prompt=8)
    )
    """How responses are sampled, `responses_per_prompt` of them to compare. Its temperature also divides the logits in
    training."""

    kl_ctl: float = 0.04
    """Weight of the KL penalty per token (its starting value with `adaptive_kl_ctl`); 0: no reference is needed."""

    kl_estimator: KLEstimator = "k3"
    """Estimate of the KL from the reference, per sampled token: k1, k2 or k3 (rlcli.ops.kl)."""

    adv_norm: bool = False
    """Normalise advantages once more, to mean 0 and standard deviation 1 over the batch's tokens (REINFORCE++)."""

    loss_aggregation: LossAggregationName = "sequence"
    """sequence: every response counts alike. token: every token counts alike, so long responses count for more.
    constant: tokens count alike, and their sum is divided by `loss_constant` times the number of responses."""

    controller: KLController = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compares_groups and self.generation.responses_per_prompt == 1:
            what = f"baseline: {self.baseline} with scale: {self.scale} compares responses to one prompt"
            raise ValueError(f"{what}: set generation.responses_per_prompt above 1")
        self.controller = self.kl_controller()

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`packed_prompts` → `packed_input_ids`, `prompt_mask`, `packed_logprobs`, `seq_no_eos_mask`."""
        return sample_responses(model, data, self.sampling)

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`packed_input_ids` → `packed_logprobs` under the present weights."""
        return recompute_logprobs(model, data, mb_spec, "packed_logprobs", self.generation.temperature)

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """Responses of words of their prompts."""
        if interface_type != "generate":
            return super().mock(interface_type, model, data)
        return imitate_responses(model, data, self.sampling)

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """`ppo_epochs` times `minibatches` optimizer steps on one batch of responses."""
        reduce, coef = reduce_over(model), self.controller.coef
        batch = prepare(self, data, coef if self.kl_in == "reward" else 0.0, reduce)
        stats = batch_stats(self, batch, data, reduce) | equal_groups(batch, reduce) | {"kl_coef": coef}
        stats |= optimizer_steps(
            self, model, batch, self._loss, self._loss_weight, mb_spec, step_if=self.may_step, cut=self.CUT
        )
        self.controller.update(*response_kl(batch, reduce))
        return stats

    def state_dict(self) -> dict[str, Any]:
        return {"kl_controller": self.controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controller.load_state_dict(state["kl_controller"])

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        """Sums over a micro-batch, of loss and stats; the engine divides by the weight of the whole step."""
        actions, entropy = taken_actions(self, output, batch)
        losses, stats = policy_losses(self, actions, entropy, batch)
        if self.kl_ctl and self.kl_in == "loss":
            columns = (actions.logprobs, actions.old_logprobs, batch.data["ref_logprobs"])
            penalty = kl_loss(*(x[actions.mask] for x in columns), self.kl_estimator, self.kl_gradient)
            losses = losses + self.controller.coef * penalty
            stats["kl_loss"] = penalty.detach().sum()
        return aggregated(self, losses, stats, batch)

    def _loss_weight(self, batch: SequenceSample) -> torch.Tensor:
        return loss_weight(self, batch)


register_interface("grpo", GRPOInterface)
