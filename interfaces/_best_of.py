"""Best of k: selects the best responses to each prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlcli.api.data import SequenceSample


def keep_best(data: SequenceSample, k: int) -> SequenceSample:
    """The k sequences of each sample with the highest `rewards` (`best_places`), in their original order."""
    rewards = iter((data.data or {})["rewards"].tolist())
    groups = data.seqlens["packed_input_ids"]
    return keep_places(data, [best_places([next(rewards) for _ in lengths], lengths, k) for lengths in groups])


def best_places(rewards: Sequence[float], lengths: Sequence[int], k: int) -> list[int]:
    """Indices of the k sequences of a sample with the highest rewards; ties go to the shorter, then the earlier."""
    ranked = sorted(range(len(rewards)), key=lambda index: (-rewards[index], lengths[index], index))
    return sorted(ranked[:k])


def keep_places(data: SequenceSample, places: Sequence[Sequence[int]]) -> SequenceSample:
    """Keep only the sequences at the given `places` of each sample.

    Keys that do not hold one entry per response (`packed_prompts`) are left out.
    """
    groups = data.seqlens["packed_input_ids"]
    keys = [key for key in data.keys if all(len(data.seqlens[key][i]) == len(g) for i, g in enumerate(groups))]
    tensors = data.data or {}
    chosen_rows, seqlens = {}, {}
    for key in keys:
        pieces = iter(tensors[key].split(data.flat_seqlens(key)))
        rows = [[next(pieces) for _ in lengths] for lengths in data.seqlens[key]]
        picked = [row[place] for row, chosen in zip(rows, places, strict=True) for place in chosen]
        chosen_rows[key] = torch.cat(picked) if picked else tensors[key]
        seqlens[key] = [
            [lengths[place] for place in chosen] for lengths, chosen in zip(data.seqlens[key], places, strict=True)
        ]
    return SequenceSample.from_default(ids=data.ids, seqlens=seqlens, data=chosen_rows, metadata=data.metadata)
