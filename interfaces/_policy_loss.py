"""The loss of a policy over a micro-batch prepared by `_rollout.prepare`, assembled from its settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import ModelOutput, Stats
from rlcli.ops.kl import kl_of_policy
from rlcli.ops.packing import action_owner
from rlcli.ops.policy_losses import LOSS_AGGREGATIONS, POLICY_LOSSES, Actions

from ._rollout import gaps_by_age
from ._rollout_settings import RolloutSettings
from ._settings import PolicyLoss, named


@dataclass(kw_only=True)
class PolicySettings(PolicyLoss, RolloutSettings):
    """Inherited by interfaces that train a policy, in addition to their kind of advantages."""


def taken_actions(settings: PolicySettings, output: ModelOutput, batch: SequenceSample) -> tuple[Actions, torch.Tensor]:
    """(the actions of the micro-batch under the trained model; the entropy of each, [A])."""
    output.temperature = settings.generation.temperature
    entropy = output.entropy  # before the log-probs: one pass over the vocabulary gives both
    tensors, lengths = batch.data, batch.flat_seqlens("packed_input_ids")
    old, advantages, mask = tensors["old_logprobs"], tensors["advantages"], tensors["loss_mask"]
    return Actions(output.logprobs, old, advantages, mask, lengths), entropy


def policy_losses(
    settings: PolicySettings, actions: Actions, entropy: torch.Tensor, batch: SequenceSample
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss of each trained action, [M]: the weighted policy loss less the entropy bonus; stats, each summed over these
    actions)."""
    losses, stats = named(POLICY_LOSSES, settings.policy_loss, settings)(actions)
    entropy = entropy[actions.mask]
    if settings.use_decoupled_loss:
        losses = losses * batch.data["loss_weights"][actions.mask]
    if settings.entropy_coef:
        losses = losses - settings.entropy_coef * entropy
    return losses, stats | {"entropy": entropy.detach().sum()}


@torch.no_grad()
def at_first(settings: PolicySettings, actions: Actions, batch: SequenceSample) -> Stats:
    """What the first optimizer step shows of the policy as the step began: how far its log-probs are from the sampler's
    and, with a KL penalty, the KL from the reference. Nothing where the trainer has computed them for the whole batch
    (`_rollout`)."""
    if settings.uses_proximal_logprobs:
        return {}
    owner = action_owner(actions.seqlens, actions.mask.device)[actions.mask]
    gaps = gaps_by_age(actions.log_ratio.abs(), batch.data["ages"][owner])
    stats: Stats = {name: (total, count) for name, (total, count) in gaps.items() if count}
    if not settings.kl_ctl:
        return stats
    response = batch.data["response_mask"]
    columns = (actions.logprobs, actions.old_logprobs, batch.data["ref_logprobs"])
    kl = kl_of_policy(*(column[response] for column in columns))
    return {**stats, "kl": (kl.sum(), response.count_nonzero())}


def aggregated(
    settings: PolicyLoss, losses: torch.Tensor, stats: dict[str, torch.Tensor], batch: SequenceSample
) -> tuple[torch.Tensor, Stats]:
    """The sum of the losses [M] weighted by `loss_aggregation`, and stats as means per action."""
    shares, _ = _aggregation(settings, batch)
    count = batch.data["loss_mask"].count_nonzero()
    return (losses * shares).sum(), {name: (total, count) for name, total in stats.items()}


def loss_weight(settings: PolicyLoss, batch: SequenceSample) -> torch.Tensor:
    """The divisor of the sum over all micro-batches and ranks."""
    return _aggregation(settings, batch)[1]


def _aggregation(settings: PolicyLoss, batch: SequenceSample) -> tuple[torch.Tensor, torch.Tensor]:
    aggregate = named(LOSS_AGGREGATIONS, settings.loss_aggregation, settings)
    weights: tuple[torch.Tensor, torch.Tensor] = aggregate(
        batch.data["loss_mask"], batch.flat_seqlens("packed_input_ids")
    )
    return weights
