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
from rlcli.api.key_meaning import AGE, SEQUENCES
from rlcli.ops.kl import kl_of_policy
from rlcli.ops.packing import action_owner
from rlcli.ops.reduce import AllReduce
from rlcli.ops.rewards import action_mask

from ._statistics import counted_means

AGES = "ages"
"""[N] int64: the age of each sequence in steps (`rlcli.api.key_meaning.AGE`)."""

SumsAndCounts = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Name of a mean → the sum of its numbers, and how many there are; both []."""


def with_ages(data: SequenceSample) -> SequenceSample:
    """The batch with the key `AGES`, which survives a split into sequences."""
    sizes = [len(lengths) for lengths in data.seqlens[SEQUENCES]]
    ages = torch.tensor(data.metadata.get(AGE) or [0] * data.bs, dtype=torch.int64)
    of_sequences = torch.repeat_interleave(ages, torch.tensor(sizes, dtype=torch.int64))
    added = SequenceSample.from_default(
        ids=data.ids,
        seqlens={AGES: [[1] * size for size in sizes]},
        data={AGES: of_sequences.to(data.data[SEQUENCES].device)},
    )
    batch = data.select(data.keys)
    batch.update_(added)
    return batch


def distances_before(batch: SequenceSample, all_reduce: AllReduce) -> dict[str, float]:
    """What is known for the whole batch: `sampler_gap`, `policy_drift` and `kl`,
    over the actions of all ranks."""
    tensors, response = batch.data, _responses(batch)
    is_recomputed = "proximal_logprobs" in batch.keys
    sums: SumsAndCounts = {}
    if is_recomputed:
        gaps = (tensors["proximal_logprobs"] - tensors["packed_logprobs"]).double().abs()
        sums |= _gaps_by_age(gaps[response], _age_of_actions(batch)[response])
    if "packed_ref_logprobs" in batch.keys and (is_recomputed or not _older(batch, all_reduce)):
        policy = tensors["proximal_logprobs" if is_recomputed else "packed_logprobs"]
        columns = (policy, tensors["packed_logprobs"], tensors["packed_ref_logprobs"])
        kl = torch.where(response, kl_of_policy(*columns), 0.0)
        sums["kl"] = (kl.double().sum(), response.count_nonzero())
    return counted_means(sums, all_reduce) if sums else {}


@torch.no_grad()
def distances_at_first(logprobs: torch.Tensor, batch: SequenceSample) -> SumsAndCounts:
    """The same of a micro-batch, given the log-probs [A] of the policy; empty if the trainer has
    computed them for the whole batch. `optimizer_steps` reports those of the first step."""
    if "proximal_logprobs" in batch.keys:
        return {}
    tensors, response, trained = batch.data, _responses(batch), batch.data["loss_mask"]
    gaps = (logprobs[trained] - tensors["packed_logprobs"][trained]).abs()
    stats = {
        name: sums
        for name, sums in _gaps_by_age(gaps, _age_of_actions(batch)[trained]).items()
        if sums[1]
    }
    if "packed_ref_logprobs" in batch.keys:
        columns = (logprobs, tensors["packed_logprobs"], tensors["packed_ref_logprobs"])
        kl = kl_of_policy(*(column[response] for column in columns))
        stats["kl"] = (kl.sum(), response.count_nonzero())
    return stats


def _responses(batch: SequenceSample) -> torch.Tensor:
    """[A] bool: the actions that chose a token of a response."""
    return action_mask(batch.data["prompt_mask"], batch.flat_seqlens(SEQUENCES))


def _age_of_actions(batch: SequenceSample) -> torch.Tensor:
    """[A] int64."""
    ages: torch.Tensor = batch.data[AGES]
    return ages[action_owner(batch.flat_seqlens(SEQUENCES), ages.device)]


def _older(batch: SequenceSample, all_reduce: AllReduce) -> bool:
    """Whether any sample of the batch, on any rank, is older than the step."""
    older = (batch.data[AGES] > 0).sum().double().reshape(1)
    return bool(float(all_reduce(older.cpu())))


def _gaps_by_age(gaps: torch.Tensor, ages: torch.Tensor) -> SumsAndCounts:
    """Sum and number of the distances [n] between the trainer's and the sampler's log-probs, in
    nats: `sampler_gap` of samples of age 0, where both have the same weights; `policy_drift` of
    older ones, whose weights have been trained since."""
    same = ages == 0
    return {
        name: (gaps[members].sum(), members.count_nonzero())
        for name, members in (("sampler_gap", same), ("policy_drift", ~same))
    }
