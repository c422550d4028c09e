"""Selects sequences of a batch: the best responses to each prompt,
or those that a call has chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import CHOSEN, SEQUENCES


def best_places(rewards: Sequence[float], lengths: Sequence[int], k: int) -> list[int]:
    """Indices of the k sequences of a sample with the highest rewards; ties go to the shorter,
    then the earlier."""
    ranked = sorted(range(len(rewards)), key=lambda index: (-rewards[index], lengths[index], index))
    return sorted(ranked[:k])


def best_of_each(data: SequenceSample, k: int) -> torch.Tensor:
    """[N] bool: whether a sequence is one of the k with the highest `rewards` of its sample
    (`best_places`)."""
    rewards = iter(data.data["rewards"].tolist())
    flags: list[bool] = []
    for lengths in data.seqlens[SEQUENCES]:
        places = best_places([next(rewards) for _ in lengths], lengths, k)
        flags += [index in places for index in range(len(lengths))]
    return torch.tensor(flags, dtype=torch.bool)


def chosen_sequences(data: SequenceSample) -> SequenceSample:
    """The batch without the sequences that `chosen` [N] excludes;
    the batch itself if it has no such key."""
    if CHOSEN not in data.keys:
        return data
    flags = iter(data.data[CHOSEN].tolist())
    places = [
        [index for index in range(len(group)) if next(flags)] for group in data.seqlens[SEQUENCES]
    ]
    return keep_places(data, places)


def keep_places(data: SequenceSample, places: Sequence[Sequence[int]]) -> SequenceSample:
    """Keep only the sequences at the given `places` of each sample.

    Keys that do not hold one entry per response (`packed_prompts`) are left out.
    """
    groups = data.seqlens[SEQUENCES]
    keys = [
        key
        for key in data.keys
        if all(len(data.seqlens[key][i]) == len(g) for i, g in enumerate(groups))
    ]
    tensors = data.data or {}
    chosen_rows, seqlens = {}, {}
    for key in keys:
        pieces = iter(tensors[key].split(data.flat_seqlens(key)))
        rows = [[next(pieces) for _ in lengths] for lengths in data.seqlens[key]]
        picked = [row[place] for row, chosen in zip(rows, places, strict=True) for place in chosen]
        chosen_rows[key] = torch.cat(picked) if picked else tensors[key]
        seqlens[key] = [
            [lengths[place] for place in chosen]
            for lengths, chosen in zip(data.seqlens[key], places, strict=True)
        ]
    return SequenceSample.from_default(
        ids=data.ids, seqlens=seqlens, data=chosen_rows, metadata=data.metadata
    )


def group_of_each(data: SequenceSample) -> torch.Tensor:
    """[N] int64: the index, in the batch, of the sample that each sequence belongs to."""
    sizes = torch.tensor([len(lengths) for lengths in data.seqlens[SEQUENCES]], dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(data.bs), sizes)
