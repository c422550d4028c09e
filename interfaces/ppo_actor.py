"""The policy of PPO: samples responses, recomputes their log-probs, learns from their advantages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.micro_batches import Cut
from rlcli.api.model import (
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Stats,
    register_interface,
)
from rlcli.interfaces._logprobs import recompute_logprobs
from rlcli.interfaces._optimizer_steps import optimizer_steps
from rlcli.interfaces._ppo import PPOSettings
from rlcli.interfaces._responses import imitate_responses, sample_responses
from rlcli.interfaces._rollout import means, prepare, reduce_over, response_kl
from rlcli.interfaces._settings import PolicyLoss, named
from rlcli.ops.kl import KLController
from rlcli.ops.policy_losses import LOSS_AGGREGATIONS, POLICY_LOSSES, Actions
from rlcli.ops.reduce import AllReduce


@dataclass(kw_only=True)
class PPOActorInterface(PolicyLoss, PPOSettings, ModelInterface):
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
        return sample_responses(model, data, self._sampling())

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`packed_input_ids` → `packed_logprobs` under the present weights."""
        return recompute_logprobs(model, data, mb_spec, "packed_logprobs", self.generation.temperature)

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """Responses of words of their prompts."""
        if interface_type != "generate":
            return super().mock(interface_type, model, data)
        return imitate_responses(model, data, self._sampling())

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """`ppo_epochs` times `minibatches` optimizer steps on one batch of responses."""
        reduce = reduce_over(model)
        batch = prepare(self, data, self.controller.coef, reduce)
        stats = self._batch_stats(batch, data, reduce)
        stats |= optimizer_steps(
            self, model, batch, self._loss, self._loss_weight, mb_spec, step_if=self.may_step, cut=self.CUT
        )
        self.controller.update(*response_kl(batch, reduce))
        return stats

    def state_dict(self) -> dict[str, Any]:
        return {"kl_controller": self.controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controller.load_state_dict(state["kl_controller"])

    def _sampling(self) -> GenerationHyperparameters:
        return dataclasses.replace(self.generation, responses_per_prompt=self.sampled_per_prompt)

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        output.temperature = self.generation.temperature
        tensors, mask, lengths = batch.data, batch.data["loss_mask"], batch.flat_seqlens("packed_input_ids")
        entropy = output.entropy[mask]  # before the log-probs: one pass over the vocabulary then gives both
        actions = Actions(output.logprobs, tensors["old_logprobs"], tensors["advantages"], mask, lengths)
        losses, stats = named(POLICY_LOSSES, self.policy_loss, self)(actions)
        if self.use_decoupled_loss:
            losses = losses * tensors["loss_weights"][mask]
        shares, _ = LOSS_AGGREGATIONS[self.loss_aggregation](mask, lengths)
        loss = (losses * shares).sum()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * (entropy * shares).sum()
        stats["entropy"] = entropy.detach().sum()
        return loss, {name: (total, mask.count_nonzero()) for name, total in stats.items()}

    def _loss_weight(self, batch: SequenceSample) -> torch.Tensor:
        aggregate = LOSS_AGGREGATIONS[self.loss_aggregation]
        return aggregate(batch.data["loss_mask"], batch.flat_seqlens("packed_input_ids"))[1]

    def _batch_stats(self, batch: SequenceSample, data: SequenceSample, reduce: AllReduce) -> dict[str, float]:
        tensors = batch.data
        responses, trained = len(tensors["rewards"]), int(tensors["loss_mask"].sum())
        tokens = int(tensors["response_mask"].sum())
        advantages = tensors["advantages"][tensors["loss_mask"]].double()
        pairs = {
            "reward": (tensors["rewards"].double().sum(), responses),
            "shaped_reward": (tensors["shaped_rewards"].double().sum(), responses),
            "kl": (tensors["kl"].double().sum(), tokens),
            "response_length": (tensors["response_mask"].sum(), responses),
            "no_eos_fraction": (tensors["seq_no_eos_mask"].sum(), responses),
            "advantage": (advantages.sum(), trained),
            "advantage_abs": (advantages.abs().sum(), trained),
            "return": (tensors["returns"][tensors["loss_mask"]].double().sum(), trained),
        }
        if not self.use_dense_reward:
            scaled = (tensors["rewards"].double() - self.reward_output_bias) * self.reward_output_scaling
            pairs["reward_clip_fraction"] = ((scaled.abs() > self.max_reward_clip).sum(), responses)
        if "solved" in data.keys:
            pairs["solved"] = (data.data["solved"].sum(), len(data.data["solved"]))
        return means(pairs, reduce) | {"kl_coef": self.controller.coef}


register_interface("ppo_actor", PPOActorInterface)
