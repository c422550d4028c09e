"""A rank's part of a checkpoint: copied at once, written by a thread while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcli.api.model import Model, PipelinableEngine
from rlcli.checkpoint.commit import seal
from rlcli.checkpoint.disk import disk_failure
from rlcli.checkpoint.role_folders import MODELS
from rlcli.checkpoint.state import HostCopy, copy_to_host, fill, size_of, write_optimizer, write_weights
from rlcli.topology import Topology

OPTIMIZERS = "optim"
"""Folder of a checkpoint that has, as MODELS does, one folder per role."""


class BackgroundWrite:
    """Files being written by a thread, then sealed: on disk and digested."""

    def __init__(self, folder: Path, write: Callable[[], Sequence[Path]]):
        self._folder = folder
        self._write = write
        self._sealed: list[dict[str, Any]] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def outcome(self, wait: bool) -> dict[str, Any]:
        """`done` and, once that is true, the digests of the `files`, or why the disk `failed` and the fault's `code`.

        Raises what else went wrong in the thread, such as NumericError.
        """
        self._thread.join(None if wait else 0)
        if self._thread.is_alive():
            return {"done": False}
        if self._error is not None:
            failure = disk_failure(self._error, self._folder)
            if failure is None:
                raise self._error
            return {"done": True, "failed": failure.what, "code": failure.code}
        return {"done": True, "files": self._sealed}

    def _run(self) -> None:
        try:
            self._sealed = [digest.as_json() for digest in seal(self._folder, self._write())]
        except BaseException as error:
            self._error = error


def has_state(model: Model) -> bool:
    """Whether the role's engine can be checkpointed at all; one that a user wrote may not."""
    return getattr(type(model.module), "state", PipelinableEngine.state) is not PipelinableEngine.state


def bytes_to_save(models: Mapping[str, Model], trained: Sequence[str], topology: Topology, rank: int) -> int:
    """What this rank's part of a checkpoint takes on the disk: its weights, and AdamW's two moments of each."""
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
    """Write what lies beside the weights; returns the files. Apart at first: other ranks write into the folder now,
    and what they have half done must not be taken for a part of the description."""
    apart = folder.with_name(f".{folder.name}")
    apart.mkdir(parents=True)
    model.module.save_description(model.tokenizer, str(apart))
    folder.mkdir(exist_ok=True)
    files = [file.rename(folder / file.name) for file in apart.iterdir()]
    apart.rmdir()
    return files


def restore_roles(models: Mapping[str, Model], folder: Path) -> None:
    """Fill the weights and optimizers of this rank's roles from a checkpoint of any number of ranks."""
    for name, model in models.items():
        optimizer = folder / OPTIMIZERS / name
        state = model.module.state(room_for_optimizer=optimizer.is_dir())
        fill(state.weights, folder / MODELS / name)
        if optimizer.is_dir():
            fill(state.optimizer, optimizer)
        model.module.state_was_filled()
