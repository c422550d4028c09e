"""Sequences of a batch: which of their tokens are answers, which sample each belongs to, the best
responses to each prompt, and a batch of those that a call has chosen."""

from __future__ import annotations

from itertools import compress

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import CHOSEN, PROMPT_MASK, SEQUENCES
from rlcli.ops.packing import action_mask
from rlcli.ops.preference_losses import sequence_sums


def answer_mask(batch: SequenceSample) -> torch.Tensor:
    """[T - N] bool: the actions that chose a token of an answer."""
    return action_mask(batch.data[PROMPT_MASK], batch.flat_seqlens(SEQUENCES))


def answer_tokens(batch: SequenceSample) -> torch.Tensor:
    """[N] float32: the number of tokens in each answer."""
    mask = answer_mask(batch)
    return sequence_sums(
        torch.ones_like(mask, dtype=torch.float32), mask, batch.flat_seqlens(SEQUENCES)
    )


def group_sizes(data: SequenceSample) -> list[int]:
    """The number of sequences of each sample."""
    return [len(lengths) for lengths in data.seqlens[SEQUENCES]]


def group_of_each(data: SequenceSample) -> torch.Tensor:
    """[N] int64: the index, in the batch, of the sample that each sequence belongs to."""
    sizes = torch.tensor(group_sizes(data), dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(data.bs), sizes)


def best_of_each(data: SequenceSample, k: int) -> torch.Tensor:
    """[N] bool: whether a sequence is one of the k with the highest `rewards` of its sample; ties
    go to the shorter, then the earlier."""
    rewards = iter(data.data["rewards"].tolist())
    flags: list[bool] = []
    for lengths in data.seqlens[SEQUENCES]:
        ranks = [(-next(rewards), length, index) for index, length in enumerate(lengths)]
        best = sorted(ranks)[:k]
        flags += [rank in best for rank in ranks]
    return torch.tensor(flags, dtype=torch.bool)


def chosen_sequences(data: SequenceSample) -> SequenceSample:
    """The batch without the sequences that `chosen` [N] excludes;
    the batch itself if it has no such key."""
    return select_sequences(data, data.data[CHOSEN]) if CHOSEN in data.keys else data


def select_sequences(data: SequenceSample, flags: torch.Tensor) -> SequenceSample:
    """Only the sequences that are flagged, in `flags` [N].

    Keys that do not hold one entry per response (`packed_prompts`) are left out.
    """
    sizes = group_sizes(data)
    chosen = [group.tolist() for group in flags.split(sizes)]
    rows, seqlens = {}, {}
    for key, lengths in data.seqlens.items():
        if [len(group) for group in lengths] == sizes:
            counts = torch.tensor(data.flat_seqlens(key), dtype=torch.int64, device=flags.device)
            rows[key] = data.data[key][torch.repeat_interleave(flags, counts)]
            seqlens[key] = [list(compress(*pair)) for pair in zip(lengths, chosen, strict=True)]
    return SequenceSample.from_default(
        ids=data.ids, seqlens=seqlens, data=rows, metadata=data.metadata
    )
