"""Writing a model as a folder that transformers reads:
one rank writes what all ranks of a role gather."""

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
"""Maximum number of bytes of an error that other ranks receive."""


@dataclass(frozen=True)
class SavingRanks:
    """The ranks of a role that save a model together."""

    leads: bool
    """Whether this one writes."""
    groups: Sequence[Any]
    """Process groups, such as those of the dimensions of a mesh: reducing over one after the other
    reduces over all ranks. Empty for a single rank."""
    device: torch.device

    def hear(self, failure: str = "") -> str:
        """The failure of the writing rank, if any; that rank passes it in.
        Every rank calls this."""
        text = failure.encode()[:LONGEST]
        letters = torch.zeros(LONGEST, dtype=torch.uint8)
        letters[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        letters = letters.to(self.device)
        for group in self.groups:
            dist.all_reduce(letters, dist.ReduceOp.MAX, group)
        return bytes(letters.cpu().tolist()).rstrip(b"\0").decode(errors="replace")


def save_model(
    lm: Any,
    parameters: Iterable[tuple[str, torch.Tensor]],
    tokenizer: Any,
    folder: Path,
    dtype: torch.dtype,
    ranks: SavingRanks,
) -> None:
    """Write the whole folder, floating-point numbers as `dtype`. Every rank calls this; the leading
    rank writes, and none returns before it is done. If it fails, the others stop at the next
    parameter and also raise an error.

    `parameters` are those of `lm`, whole, each produced on demand, which may require all ranks. Of
    `lm` itself, only names, shapes and buffers are used.
    """
    if not ranks.leads:
        _take_part(parameters, ranks)
        return
    try:
        with _written_aside(folder) as partial:
            describe(lm, dtype, tokenizer, str(partial))
            announced = _announced(parameters, ranks)
            write_weights(lm, announced, partial, dtype)
            deque(announced, maxlen=0)  # to stay in step with the other ranks
    except Exception as error:
        ranks.hear(_told(error))
        raise
    ranks.hear()


def _announced(
    parameters: Iterable[tuple[str, torch.Tensor]], ranks: SavingRanks
) -> Iterator[tuple[str, torch.Tensor]]:
    """Signal the other ranks, which wait, before each parameter and after the last."""
    ranks.hear()
    for parameter in parameters:
        yield parameter
        ranks.hear()


def _take_part(parameters: Iterable[tuple[str, torch.Tensor]], ranks: SavingRanks) -> None:
    source = iter(parameters)
    is_over = False
    while not (failure := ranks.hear()) and not is_over:
        is_over = next(source, None) is None
    if failure:
        number, _, message = failure.partition(" ")
        if int(number):
            raise OSError(int(number), message)
        raise ModelError(f"the rank that writes the model failed: {message}")


def _told(error: Exception) -> str:
    """The error for the other ranks: its number, if it is a system error, and its text."""
    if isinstance(error, OSError) and error.errno:
        return f"{error.errno} {error.strerror}"
    return f"0 {error.what if isinstance(error, RlcliError) else error!r}"


def describe(lm: Any, dtype: torch.dtype, tokenizer: Any, folder: str) -> None:
    """Write the files of a model folder other than the weights."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    config = copy.deepcopy(lm.config)
    config.architectures = [type(lm).__name__.removeprefix("FSDP")]
    config.dtype = dtype
    for name in config.sub_configs:
        if (sub_config := getattr(config, name, None)) is not None:
            sub_config.dtype = dtype
    config.save_pretrained(folder)
    if lm.can_generate():
        # its save_pretrained refuses settings that many published models have, such as a
        # temperature without do_sample
        file = Path(folder) / "generation_config.json"
        _generation_config(lm, tokenizer).to_json_file(file)


@contextmanager
def _written_aside(folder: Path) -> Iterator[Path]:
    """A folder next to the target, renamed to it at the end,
    so that the target is either complete or absent."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # a process may have been killed while saving
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _generation_config(lm: Any, tokenizer: Any) -> Any:
    """The model's generation settings, with the tokenizer's end and padding tokens. Of a model that
    ends its responses with any of several tokens, such as the end of a turn, all are kept."""
    config: Any = lm.generation_config
    if tokenizer is not None:
        config.eos_token_id = _ends(tokenizer.eos_token_id, config.eos_token_id)
        config.pad_token_id = tokenizer.pad_token_id
    return config


def _ends(end: int, ends: int | list[int] | None) -> int | list[int]:
    """The tokenizer's end token before the further ones among several of the model."""
    further = [id_ for id_ in ends if id_ != end] if isinstance(ends, list) else []
    return [end, *further] if further else end
