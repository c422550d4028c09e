"""A rank's part of a checkpoint: copied at once, written by a thread while training continues."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlcli.api.model import HoldsWeights, Model
from rlcli.checkpoint.commit import seal
from rlcli.checkpoint.disk import disk_failure
from rlcli.checkpoint.manifest import FileDigest
from rlcli.checkpoint.role_folders import MODELS
from rlcli.checkpoint.state import HostCopy, copy_to_host, size_of, write_optimizer, write_weights, writers_of
from rlcli.checkpoint.state_reading import fill
from rlcli.runtime.commits import WRITTEN
from rlcli.runtime.component_faults import attribute_user_errors
from rlcli.runtime.messages import Failure, Tell
from rlcli.topology import Topology

OPTIMIZERS = "optim"
"""Folder of a checkpoint that has, like MODELS, one folder per role."""


def write_and_report(
    folder: Path, step: int, rank: int, write: Callable[[], Sequence[Path]], report: Tell
) -> threading.Thread:
    """Write files in a thread and seal them: sync and digest. It reports WRITTEN with the checkpoint's `step` and the
    digests of its `files`, or with the error: ResourceError if the disk was the cause."""

    def work() -> None:
        sealed: list[FileDigest] = []
        failure = None
        try:
            with attribute_user_errors():
                sealed = seal(folder, write())
        except BaseException as error:
            trace = "".join(traceback.format_exception(error))
            failure = Failure.of(disk_failure(error, folder) or error, f"rank {rank}", trace)
        report(WRITTEN, {"step": step, "files": [digest.as_json() for digest in sealed]}, failure)

    thread = threading.Thread(target=work, name="checkpoint", daemon=True)
    thread.start()
    return thread


def has_state(model: Model) -> bool:
    """Whether the role's engine can be checkpointed at all; one that a user wrote may not support it."""
    return getattr(type(model.module), "state", HoldsWeights.state) is not HoldsWeights.state


def bytes_to_save(models: Mapping[str, Model], trained: Sequence[str], topology: Topology, rank: int) -> int:
    """Disk space of this rank's part of a checkpoint: its weights, and AdamW's two moments for each of them."""
    total = 0
    for name, model in models.items():
        if has_state(model):
            weights = size_of(model.module.state().weights, leads=rank == topology.placement(name).ranks[0])
            total += weights * (3 if name in trained else 1)
    return total


def copy_roles(models: Mapping[str, Model], topology: Topology, rank: int) -> dict[str, HostCopy]:
    """This rank's parts of the roles that it holds."""
    return {
        name: copy_to_host(model.module.state(), leads=rank == topology.placement(name).ranks[0])
        for name, model in models.items()
    }


def write_roles(copies: Mapping[str, HostCopy], models: Mapping[str, Model], folder: Path, rank: int) -> list[Path]:
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
    """Write the files that accompany the weights; returns them. Uses a separate folder first: other ranks write into
    the target now, and their unfinished files must not be mistaken for a part of the description."""
    apart = folder.with_name(f".{folder.name}")
    apart.mkdir(parents=True)
    model.module.save_description(model.tokenizer, str(apart))
    folder.mkdir(exist_ok=True)
    files = [file.rename(folder / file.name) for file in apart.iterdir()]
    apart.rmdir()
    return files


def restore_roles(
    models: Mapping[str, Model], folder: Path, mirrored: Mapping[str, str], topology: Topology, rank: int
) -> None:
    """Fill the weights and optimizers of this rank's roles from a checkpoint of any number of ranks. `mirrored`: role →
    the role whose weights it has."""
    for name, model in models.items():
        optimizer, source = folder / OPTIMIZERS / name, mirrored.get(name, name)
        state = model.module.state(room_for_optimizer=optimizer.is_dir())
        first = topology.placement(source).ranks[0]
        fill(state.weights, folder / MODELS / source, writers_of(state.weights, rank, first))
        if optimizer.is_dir():
            fill(state.optimizer, optimizer, writers_of(state.optimizer, rank, first))
        model.module.state_was_filled(state)
