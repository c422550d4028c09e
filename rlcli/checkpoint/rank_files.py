"""A rank's part of a checkpoint: copied at once, written while training continues, and read again
by any number of ranks.

Weights and optimizers have one folder per role. Samples that are finished are, for each rank, one
safetensors file and a description in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from rlcli.api.data import SequenceSample
from rlcli.api.model import HoldsWeights, Model
from rlcli.checkpoint.role_folders import MODELS
from rlcli.checkpoint.state import (
    HostCopy,
    copy_to_host,
    size_of,
    write_optimizer,
    write_weights,
    writers_of,
)
from rlcli.checkpoint.state_reading import fill

OPTIMIZERS = "optim"
"""Folder of a checkpoint that has, like MODELS, one folder per role."""

SAMPLES = "samples"
"""Folder of a checkpoint."""


def has_state(model: Model) -> bool:
    """Whether the role's engine can be checkpointed at all;
    one that a user wrote may not support it."""
    return getattr(type(model.module), "state", HoldsWeights.state) is not HoldsWeights.state


def bytes_to_save(
    models: Mapping[str, Model], trained: Collection[str], led: Collection[str]
) -> int:
    """Disk space of this rank's part of a checkpoint: its weights,
    and AdamW's two moments for each of them. `led`: see `copy_roles`."""
    total = 0
    for name, model in models.items():
        if has_state(model):
            weights = size_of(model.module.state().weights, leads=name in led)
            total += weights * (3 if name in trained else 1)
    return total


def copy_roles(models: Mapping[str, Model], led: Collection[str]) -> dict[str, HostCopy]:
    """This rank's parts of the roles that it holds. Of those that it leads (`led`), it writes what
    is the same on all their ranks."""
    return {
        name: copy_to_host(model.module.state(), leads=name in led)
        for name, model in models.items()
    }


def write_roles(
    copies: Mapping[str, HostCopy], models: Mapping[str, Model], folder: Path, rank: int
) -> list[Path]:
    """Write a rank's copies into the folder of a checkpoint; returns every file that it wrote."""
    files: list[Path] = []
    for name, copy in copies.items():
        model, described = models[name], folder / MODELS / name
        if copy.leads:
            files += _describe(model, described)
        files += write_weights(copy, described, rank)
        files += write_optimizer(copy, folder / OPTIMIZERS / name, rank)
    return list(dict.fromkeys(files))


def _describe(model: Model, folder: Path) -> list[Path]:
    """Write the files that accompany the weights, such as chat templates in a folder of their own;
    returns them. Uses a separate folder first: other ranks write into the target now, and their
    unfinished files must not be mistaken for a part of the description."""
    apart = folder.with_name(f".{folder.name}")
    apart.mkdir(parents=True)
    model.module.save_description(model.tokenizer, str(apart))
    folder.mkdir(exist_ok=True)
    names = [file.relative_to(apart) for file in apart.rglob("*") if file.is_file()]
    for path in apart.iterdir():
        path.rename(folder / path.name)
    apart.rmdir()
    return [folder / name for name in names]


def restore_roles(
    models: Mapping[str, Model],
    folder: Path,
    followed: Mapping[str, str],
    first_ranks: Mapping[str, int],
    rank: int,
) -> None:
    """Fill the weights and optimizers of this rank's roles from a checkpoint of any number of
    ranks. A role that it does not hold had the weights of the one it follows. `followed`: role →
    that one; `first_ranks`: role → the rank that leads it."""
    for name, model in models.items():
        is_stored = (folder / MODELS / name).is_dir()
        source = name if is_stored else followed.get(name, name)
        optimizer = folder / OPTIMIZERS / name
        state = model.module.state(room_for_optimizer=optimizer.is_dir())
        first = first_ranks[source]
        fill(state.weights, folder / MODELS / source, writers_of(state.weights, rank, first))
        if optimizer.is_dir():
            fill(state.optimizer, optimizer, writers_of(state.optimizer, rank, first))
        model.module.state_was_filled(state)


def write_samples(samples: Sequence[SequenceSample], folder: Path, rank: int) -> list[Path]:
    """Write samples of batch size 1, possibly only some of their keys; returns the files."""
    if not samples:
        return []
    home = folder / SAMPLES
    home.mkdir(exist_ok=True)
    descriptions, tensors = home / f"rank-{rank:05d}.json", home / f"rank-{rank:05d}.safetensors"
    descriptions.write_text(
        json.dumps([sample.meta().as_json() for sample in samples]), encoding="utf-8"
    )
    # copies, because safetensors refuses keys that share one tensor
    stored = {
        f"{sample.ids[0]}/{key}": tensor.detach().to("cpu", copy=True).contiguous()
        for sample in samples
        for key, tensor in sample.data.items()
    }
    save_file(stored, tensors)
    return [descriptions, tensors]


def read_samples(folder: Path, ids: Collection[str]) -> list[SequenceSample]:
    """Samples written by any ranks, each with all its keys, in the order of `ids`."""
    loaded: dict[str, SequenceSample] = {}
    for descriptions in sorted((folder / SAMPLES).glob("rank-*.json")):
        with safe_open(descriptions.with_suffix(".safetensors"), "pt") as file:
            for fields in json.loads(descriptions.read_text(encoding="utf-8")):
                sample = SequenceSample.from_json(fields)
                id_ = str(sample.ids[0])
                if id_ not in ids:
                    continue
                sample.data = {key: file.get_tensor(f"{id_}/{key}") for key in sample.keys}
                if id_ in loaded:
                    loaded[id_].update_(sample)
                else:
                    loaded[id_] = sample
    return [loaded[id_] for id_ in ids]
