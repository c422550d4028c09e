"""Writing a model as a folder that transformers reads."""

from __future__ import annotations

import copy
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlcli.api.model_export import write_weights


def save_model(lm: Any, parameters: Iterable[tuple[str, torch.Tensor]], tokenizer: Any, folder: Path,
               dtype: torch.dtype, *, leads: bool) -> None:  # fmt: skip
    """Write the whole folder, floating-point numbers as `dtype`. Every rank calls this; the one that `leads` writes.

    `parameters` are those of `lm`, whole, each as it is asked for, which may take all ranks. Of `lm` itself only names,
    shapes and buffers count.
    """
    if not leads:
        deque(parameters, maxlen=0)  # the others take part in gathering
        return
    with _written_aside(folder) as partial:
        describe(lm, dtype, tokenizer, str(partial))
        write_weights(lm, parameters, partial, dtype)


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
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
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
