"""The finished samples of a checkpoint: for each rank one safetensors file and a description in JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from rlcli.api.data import SequenceSample

SAMPLES = "samples"
"""Folder of a checkpoint."""


def write_samples(samples: Sequence[SequenceSample], folder: Path, rank: int) -> list[Path]:
    """Write samples of batch size 1, possibly only some of their keys; returns the files."""
    from safetensors.torch import save_file

    if not samples:
        return []
    home = folder / SAMPLES
    home.mkdir(exist_ok=True)
    described, tensors = home / f"rank-{rank:05d}.json", home / f"rank-{rank:05d}.safetensors"
    described.write_text(json.dumps([sample.meta().as_json() for sample in samples]), encoding="utf-8")
    there = {
        f"{sample.ids[0]}/{key}": tensor.detach().cpu().contiguous()
        for sample in samples
        for key, tensor in (sample.data or {}).items()
        if tensor is not None
    }
    save_file(there, tensors)
    return [described, tensors]


def read_samples(folder: Path, ids: Collection[str]) -> list[SequenceSample]:
    """Samples written by any ranks, each with all its keys, in the order of `ids`."""
    from safetensors import safe_open

    loaded: dict[str, SequenceSample] = {}
    for described in sorted((folder / SAMPLES).glob("rank-*.json")):
        parts = [SequenceSample.from_json(one) for one in json.loads(described.read_text(encoding="utf-8"))]
        with safe_open(described.with_suffix(".safetensors"), "pt") as file:
            there = set(file.keys())
            for part in parts:
                id_ = str(part.ids[0])
                if id_ in ids:
                    names = {key: f"{id_}/{key}" for key in part.keys}
                    data = {key: file.get_tensor(name) if name in there else None for key, name in names.items()}
                    whole = SequenceSample(ids=[id_], seqlens=part.seqlens, data=data, metadata=part.metadata)
                    if id_ in loaded:
                        loaded[id_].update_(whole)
                    else:
                        loaded[id_] = whole
    return [loaded[id_] for id_ in ids]
