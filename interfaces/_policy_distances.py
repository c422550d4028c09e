"""How far a policy is, as a training step begins, from the sampler's log-probs and from the
reference.

Known for the whole batch before the step if the trainer has computed `proximal_logprobs` or, for
the KL, if no sample is older than the step: the sampler's log-probs are then those of the policy.
Otherwise the first optimizer step, whose weights are those that the training step began with, shows
it for its part of the batch.
"""

from __future__ import annotations

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import AGE, REFERENCE, SAMPLED_LOGPROBS, SEQUENCES
from rlcli.ops.kl import kl_of_policy
from rlcli.ops.packing import action_mask
from rlcli.ops.reduce import AllReduce, counted_means

RECOMPUTED = "proximal_logprobs"

SumsAndCounts = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Name of a mean → the sum of its numbers, and how many there are; both []."""


def distances_before(batch: SequenceSample, all_reduce: AllReduce) -> dict[str, float]:
    """What is known for the whole batch: `sampler_gap`, `policy_drift` and `kl`,
    over the actions of all ranks."""
    sampled = batch.data[SAMPLED_LOGPROBS]
    if RECOMPUTED in batch.keys:
        policy = batch.data[RECOMPUTED]
        gaps = _by_age((policy - sampled).double().abs(), batch, actions_of(batch))
        return counted_means(_kl(policy, batch) | gaps, all_reduce)
    if REFERENCE not in batch.keys or all_reduce(_are_older(batch).sum().double().cpu()) > 0:
        return {}
    return counted_means(_kl(sampled, batch), all_reduce)


@torch.no_grad()
def distances_at_first(policy: torch.Tensor, batch: SequenceSample) -> SumsAndCounts:
    """The same of a micro-batch, given the log-probs [A] of the policy; empty if the trainer has
    computed them for the whole batch. `optimizer_steps` reports those of the first step.

    Which names there are must not depend on the samples: those of another rank may be older.
    """
    if RECOMPUTED in batch.keys:
        return {}
    gaps = (policy - batch.data[SAMPLED_LOGPROBS]).abs()
    return _kl(policy, batch) | _by_age(gaps, batch, batch.data["loss_mask"])


def _kl(policy: torch.Tensor, batch: SequenceSample) -> SumsAndCounts:
    """KL of the policy from the reference, if there is one, over the actions of responses."""
    if REFERENCE not in batch.keys:
        return {}
    actions = actions_of(batch)
    return {"kl": (sum_of_kl(policy, batch, actions), actions.count_nonzero())}


def sum_of_kl(policy: torch.Tensor, batch: SequenceSample, actions: torch.Tensor) -> torch.Tensor:
    """[] float64: the KL of a policy with these log-probs [A] from the reference, in nats, summed
    over these actions, [A] bool, which the sampler chose."""
    kl = kl_of_policy(policy, batch.data[SAMPLED_LOGPROBS], batch.data[REFERENCE])
    return torch.where(actions, kl, 0.0).double().sum()


def _by_age(gaps: torch.Tensor, batch: SequenceSample, counted: torch.Tensor) -> SumsAndCounts:
    """Sum and number of the distances [A] between the trainer's and the sampler's log-probs, in
    nats: `sampler_gap` of samples of age 0, where both have the same weights; `policy_drift` of
    older ones, whose weights have been trained since."""
    older = _are_older(batch)
    members = {"sampler_gap": counted & ~older, "policy_drift": counted & older}
    return {name: (gaps[mask].sum(), mask.count_nonzero()) for name, mask in members.items()}


def actions_of(batch: SequenceSample) -> torch.Tensor:
    """[A] bool: the actions that chose a token of a response."""
    return action_mask(batch.data["prompt_mask"], batch.flat_seqlens(SEQUENCES))


def _are_older(batch: SequenceSample) -> torch.Tensor:
    """[A] bool: whether the weights that sampled an action are older than the training step."""
    ages = torch.tensor(batch.metadata.get(AGE) or [0] * batch.bs, dtype=torch.int64)
    actions = [sum(lengths) - len(lengths) for lengths in batch.seqlens[SEQUENCES]]
    owners = torch.repeat_interleave(ages > 0, torch.tensor(actions, dtype=torch.int64))
    return owners.to(batch.data[SEQUENCES].device)
