"""Writing a model as a folder that transformers reads: one rank writes what all of a role gather."""

from __future__ import annotations

import copy
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlcli.api.model_export import write_weights
from rlcli.errors import ModelError, RlcliError

LONGEST = 500
"""Bytes that other ranks hear of an error."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a role that save a model together."""

    leads: bool
    """Whether this one writes."""
    groups: Sequence[Any]
    """Process groups, such as those of the dimensions of a mesh: what is reduced over one after the other is reduced
    over all ranks. None for a single rank."""
    device: torch.device

    def hear(self, failure: str = "") -> str:
        """What has failed on the rank that writes, if anything; it says so here. Every rank calls this."""
        text = failure.encode()[:LONGEST]
        said = torch.zeros(LONGEST, dtype=torch.uint8)
        said[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        said = said.to(self.device)
        for group in self.groups:
            dist.all_reduce(said, dist.ReduceOp.MAX, group)
        return bytes(said.cpu().tolist()).rstrip(b"\0").decode(errors="replace")


def save_model(lm: Any, parameters: Iterable[tuple[str, torch.Tensor]], tokenizer: Any, folder: Path,
               dtype: torch.dtype, ranks: Ranks) -> None:  # fmt: skip
    """Write the whole folder, floating-point numbers as `dtype`. Every rank calls this; the one that leads writes, and
    none returns before it is done. If it fails, the others stop at the next parameter and raise an error as well.

    `parameters` are those of `lm`, whole, each as it is asked for, which may take all ranks. Of `lm` itself only names,
    shapes and buffers count.
    """
    if not ranks.leads:
        _take_part(parameters, ranks)
        return
    try:
        with _written_aside(folder) as partial:
            describe(lm, dtype, tokenizer, str(partial))
            given = _announced(parameters, ranks)
            write_weights(lm, given, partial, dtype)
            deque(given, maxlen=0)  # so that this rank is as far as the others
    except Exception as error:
        ranks.hear(_told(error))
        raise
    ranks.hear()


def _announced(parameters: Iterable[tuple[str, torch.Tensor]], ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """The other ranks wait for a word before each parameter, and after the last."""
    ranks.hear()
    for parameter in parameters:
        yield parameter
        ranks.hear()


def _take_part(parameters: Iterable[tuple[str, torch.Tensor]], ranks: Ranks) -> None:
    source = iter(parameters)
    is_over = False
    while not (failure := ranks.hear()) and not is_over:
        is_over = next(source, None) is None
    if failure:
        number, _, said = failure.partition(" ")
        if int(number):
            raise OSError(int(number), said)
        raise ModelError(f"the rank that writes the model failed: {said}")


def _told(error: Exception) -> str:
    """For the other ranks: its number, if it is the system's, and its words."""
    if isinstance(error, OSError) and error.errno:
        return f"{error.errno} {error.strerror}"
    return f"0 {error.what if isinstance(error, RlcliError) else error!r}"


def describe(lm: Any, dtype: torch.dtype, tokenizer: Any, folder: str) -> None:
    """Write what a model's folder holds besides its weights."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    config = copy.deepcopy(lm.config)
    config.architectures = [type(lm).__name__.removeprefix("FSDP")]
    config.dtype = dtype
    config.save_pretrained(folder)
    if lm.can_generate():
        _generation_config(lm, tokenizer).save_pretrained(folder)


@contextmanager
def _written_aside(folder: Path) -> Iterator[Path]:
    """A folder next to the target, which takes its place at the end: it is either whole or not there."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # a process may have been killed while it saved
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _generation_config(lm: Any, tokenizer: Any) -> Any:
    """The model's settings for generation, which name the tokens that the tokenizer ends and pads with."""
    config: Any = lm.generation_config
    if tokenizer is not None:
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    return config
