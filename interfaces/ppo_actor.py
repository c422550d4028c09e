"""The policy of PPO: samples responses, recomputes their log-probs, learns from their advantages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.micro_batches import Cut
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, Stats, register_interface
from rlcli.interfaces._logprobs import recompute_logprobs
from rlcli.interfaces._optimizer_steps import optimizer_steps
from rlcli.interfaces._policy_loss import PolicySettings, aggregated, loss_weight, policy_losses, taken_actions
from rlcli.interfaces._ppo import PPOSettings
from rlcli.interfaces._responses import imitate_responses, sample_responses
from rlcli.interfaces._rollout import batch_stats, prepare, reduce_over, response_kl
from rlcli.ops.kl import KLController


@dataclass(kw_only=True)
class PPOActorInterface(PolicySettings, PPOSettings, ModelInterface):
    """Generates responses and trains the policy on them with PPO's clipped loss."""

    READS: ClassVar[Declaration] = {
        "generate": ("packed_prompts",),
        "inference": ("packed_input_ids", "prompt_mask if given"),
    }
    WRITES: ClassVar[Declaration] = {
        "generate": ("packed_input_ids", "prompt_mask", "packed_logprobs", "seq_no_eos_mask"),
        "inference": ("packed_logprobs",),
    }

    CUT: ClassVar[Cut] = "sequence"

    controller: KLController = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
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
        reduce = reduce_over(model)
        batch = prepare(self, data, self.controller.coef, reduce)
        stats = batch_stats(self, batch, data, reduce) | {"kl_coef": self.controller.coef}
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
        losses, stats = policy_losses(self, *taken_actions(self, output, batch), batch)
        return aggregated(self, losses, stats, batch)

    def _loss_weight(self, batch: SequenceSample) -> torch.Tensor:
        return loss_weight(self, batch)


register_interface("ppo_actor", PPOActorInterface)
