"""Batches as a policy itself samples them, and how far it moves in a step."""

from __future__ import annotations

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import REFERENCE, SAMPLED_LOGPROBS
from rlcli.testing.arguments import Changes
from rlcli.testing.interface.logprobs import all_logprobs
from rlcli.testing.interface.training_trial import Rehearsal
from rlcli.testing.tiny_engine import TinyEngine

LOGPROBS = (SAMPLED_LOGPROBS, "old_logprobs", REFERENCE, "proximal_logprobs")


def with_own_logprobs(
    batch: SequenceSample, engine: TinyEngine, temperature: float = 1.0
) -> SequenceSample:
    """The batch, all of whose log-probs are those of the model at this temperature."""
    logprobs = all_logprobs(engine, batch, temperature).float()
    copy = batch.select(batch.keys)
    copy.data |= dict.fromkeys(set(LOGPROBS) & batch.keys, logprobs)
    return copy


def in_one_step(rehearsal: Rehearsal) -> Changes:
    """Arguments with which a batch is not divided into minibatches, if there are such."""
    return {"minibatches": 1} if hasattr(rehearsal.make(), "minibatches") else {}


def gap_of_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The largest difference of a weight."""
    return max(
        float((weight - second[name]).detach().abs().max()) for name, weight in first.items()
    )
