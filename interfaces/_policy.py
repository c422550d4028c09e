"""Shared by every interface that samples with a policy and trains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.metrics import Metrics
from rlcli.api.micro_batches import Cut
from rlcli.api.model import MicroBatchSpec, Model, ModelOutput, Stats
from rlcli.ops.reduce import AllReduce

from ._generating import Generating
from ._logprobs import recompute_logprobs
from ._optimizer_steps import optimizer_steps
from ._policy_loss import PolicySettings, loss_weight
from ._rollout import response_kl
from ._settings import OptimizerSteps


@dataclass(kw_only=True)
class Policy(OptimizerSteps, PolicySettings, Generating):
    """Samples responses, gives log-probs, takes optimizer steps. What is specific to an algorithm, how it turns a
    rollout into a batch and its loss, is in `train_step` and `_loss` of its own file."""

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask if given")}
    WRITES: ClassVar[Declaration] = {"inference": ("packed_logprobs",)}
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",), "inference": ("lm",)}

    METRICS: ClassVar[Metrics] = {
        "kl": ("nats per token", "KL of the policy as the step begins from the reference: k3, weighted by how much "
               "likelier a token is than under the policy that sampled it; mean over the tokens of responses"),
        "kl_coef": ("reward per nat", "weight of the KL penalty in the step"),
        "shaped_reward": ("reward", "mean reward of the responses after scaling, clipping and length penalties"),
        "reward_clip_fraction": ("share", "share of responses whose reward max_reward_clip clips"),
        "response_length": ("tokens", "mean length of the responses"),
        "no_eos_fraction": ("share", "share of responses that were cut off"),
        "advantage": ("advantage", "mean over the responses of the mean advantage of their trained tokens"),
        "advantage_abs": ("advantage", "the same of the size of advantages"),
        "sampler_gap": ("nats per token", "mean distance of the trainer's log-probs from the sampler's where both have "
                        "the same weights: how much their engines differ"),
        "policy_drift": ("nats per token", "mean distance of the trainer's log-probs from the sampler's where samples "
                         "are of older weights: how far training has moved the policy since"),
        "importance_ratio": ("ratio", "mean ratio of the policy to the old one, over the trained tokens"),
        "approx_kl": ("nats per token", "KL of the old policy from the policy (k1), mean over the trained tokens"),
        "clip_fraction": ("share", "share of trained tokens whose ratio is clipped"),
        "dual_clip_fraction": ("share", "share of trained tokens whose loss c_clip bounds"),
        "entropy": ("nats per token", "entropy of the policy, mean over the trained tokens"),
    }  # fmt: skip

    CUT: ClassVar[Cut] = "sequence"  # groups are compared before the loss, which looks at one sequence at a time

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`packed_input_ids` → `packed_logprobs` under the current weights."""
        return recompute_logprobs(model, data, mb_spec, "packed_logprobs", self.generation.temperature)

    def state_dict(self) -> dict[str, Any]:
        return {"kl_controller": self.controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.controller.load_state_dict(state["kl_controller"])

    def _take_steps(
        self, model: Model, batch: SequenceSample, mb_spec: MicroBatchSpec, reduce: AllReduce
    ) -> dict[str, float]:
        """Take `ppo_epochs` times `minibatches` optimizer steps, then update the KL controller."""
        stats = {"kl_coef": self.controller.coef}
        stats |= optimizer_steps(
            self, model, batch, self._loss, self._loss_weight, mb_spec, step_if=self.may_step, cut=self.CUT
        )
        self.controller.update(*response_kl(batch, reduce))
        return stats

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        """Sums over a micro-batch of loss and stats; the engine divides by the weight of the whole step."""
        raise NotImplementedError

    def _loss_weight(self, batch: SequenceSample) -> torch.Tensor:
        return loss_weight(self, batch)
