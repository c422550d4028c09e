"""Best of k: of the responses to a prompt, train on the best."""

from __future__ import annotations

import torch

from rlcli.api.data import SequenceSample


def keep_best(data: SequenceSample, k: int) -> SequenceSample:
    """The k sequences of each sample with the highest `rewards`, in their order; of equals the shorter, then
    the earlier.

    Keys that do not hold one entry per response (`packed_prompts`) are left out.
    """
    groups = data.seqlens["packed_input_ids"]
    keys = [key for key in data.keys if all(len(data.seqlens[key][i]) == len(g) for i, g in enumerate(groups))]
    tensors = data.data or {}
    rewards = iter(tensors["rewards"].tolist())
    chosen = []
    for lengths in groups:
        ranked = sorted((-next(rewards), length, place) for place, length in enumerate(lengths))
        chosen.append(sorted(place for _, _, place in ranked[:k]))
    kept, seqlens = {}, {}
    for key in keys:
        pieces = iter(tensors[key].split(data.flat_seqlens(key)))
        rows = [[next(pieces) for _ in lengths] for lengths in data.seqlens[key]]
        picked = [row[place] for row, places in zip(rows, chosen, strict=True) for place in places]
        kept[key] = torch.cat(picked) if picked else tensors[key]
        seqlens[key] = [
            [lengths[place] for place in places] for lengths, places in zip(data.seqlens[key], chosen, strict=True)
        ]
    return SequenceSample.from_default(ids=data.ids, seqlens=seqlens, data=kept, metadata=data.metadata)
