"""PPO's policy: samples responses, recomputes their log-probs, trains on their advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec, Model, ModelOutput, Stats, register_interface

from ._policy import Policy
from ._policy_loss import aggregated, at_first, policy_losses, taken_actions
from ._ppo import PPOSettings
from ._rollout import batch_stats, prepare, proximal_gaps, reduce_over


@dataclass(kw_only=True)
class PPOActorInterface(Policy, PPOSettings):
    """Generates responses and trains the policy on them with PPO's clipped loss."""

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """`ppo_epochs` times `minibatches` optimizer steps on one batch of responses."""
        reduce = reduce_over(model)
        batch = prepare(self, data, self.controller.coef, reduce)
        of_batch = batch_stats(self, batch, reduce) | proximal_gaps(self, data, reduce)
        return self._take_steps(model, batch, mb_spec, reduce) | of_batch

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        actions, entropy = taken_actions(self, output, batch)
        losses, stats = policy_losses(self, actions, entropy, batch)
        loss, means = aggregated(self, losses, stats, batch)
        return loss, {**means, **at_first(self, actions, batch)}


register_interface("ppo_actor", PPOActorInterface)
