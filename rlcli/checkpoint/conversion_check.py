"""Whether a converted model equals its source, judged by transformers and torch and by none of the
converter's code."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlcli.api.model_class import class_of
from rlcli.api.model_export import own_weights
from rlcli.api.model_folder import check_folder
from rlcli.api.weight_files import INDEX, WHOLE
from rlcli.checkpoint.convert import Conversion
from rlcli.checkpoint.state_reading import fill
from rlcli.checkpoint.tensor_files import stored_tensors
from rlcli.errors import ModelError, NumericError

PROMPTS, LENGTH = 8, 16
"""Probe prompts, and tokens in each: arbitrary ones, since any difference must show."""

UNCHECKED = "--no-verify skips this check"

ALIGNMENT = 64
"""Bytes: where torch's own allocator starts a tensor on a CPU."""

_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class ConversionReport:
    """What was compared and found to be the same."""

    tensors: int
    parameters: int
    tied: bool
    prompts: int
    max_difference: float
    """Between the outputs; anything but 0 means that the models differ, and is an error."""


@dataclass(frozen=True)
class _Seen:
    """What is compared of a model; the model itself is not kept."""

    digests: dict[str, bytes]
    logits: torch.Tensor
    tied: bool


def check_conversion(conversion: Conversion, folder: Path) -> ConversionReport:
    """Compare the files in `folder` with what was planned, and their model with the source's.

    Both models are loaded by transformers, the source's numbers rounded by torch. Raises ModelError
    with the first difference, NumericError for a number that is not finite.
    """
    count = _check_files(conversion, folder)
    dtype = next((_TYPES[name] for name in conversion.dtypes if name in _TYPES), torch.float32)
    after = _seen(folder, dtype, None)
    before = _seen(conversion.source, dtype, _rows(conversion))
    odd = _different(before.digests, after.digests)
    if odd:
        raise ModelError(
            f"{len(odd)} parameters differ from the source, first {odd[0]}; nothing was kept"
        )
    if before.tied != after.tied:
        raise ModelError(
            f"the output matrix is {'' if after.tied else 'not '}tied to the "
            "embedding, unlike before"
        )
    difference = float((before.logits - after.logits).abs().max())
    if difference != 0.0:
        raise ModelError(
            f"logits differ by up to {difference:g} from those of the source; nothing was kept"
        )
    return ConversionReport(count, len(after.digests), after.tied, PROMPTS, difference)


def _check_files(conversion: Conversion, folder: Path) -> int:
    """Check that names, shapes and types on disk are as planned."""
    planned = {spec.name: spec for spec in conversion.outputs}
    written = {name: tensor.spec for name, tensor in stored_tensors(folder).items()}
    odd = _different(planned, written)
    if odd:
        name = odd[0]
        message = f"{name} was written as {written.get(name)} instead of {planned.get(name)}"
        raise ModelError(message)
    return len(written)


def _different(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """The names whose values differ, or that only one of both has."""
    names = sorted({*before, *after})
    return [name for name in names if before.get(name) != after.get(name)]


def _rows(conversion: Conversion) -> tuple[int, int] | None:
    """For a padded embedding: its rows in the source, and those that were kept.
    None if it is not padded."""
    for move in conversion.moves:
        before, after = move.sources[0].spec.shape, move.outputs[0].shape
        if move.is_copy and before != after:
            return before[0], after[0]
    rows = conversion.rewritten.get("config.json", {}).get("vocab_size")
    return (rows, rows) if rows is not None else None


def _seen(folder: Path, dtype: torch.dtype, rows: tuple[int, int] | None) -> _Seen:
    from transformers.utils import logging

    logging.set_verbosity_error()  # its reports and progress bars are not for our users
    logging.disable_progress_bar()
    check_folder(folder, weights=True)
    model = _loaded(folder, dtype, rows[0] if rows else None).eval()
    if rows is not None and rows[0] != rows[1]:
        model.resize_token_embeddings(rows[1], mean_resizing=False)  # type: ignore[operator]
    digests = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(parameter.isfinite().all()):
            raise NumericError(f"{name} in {folder} holds values that are not finite", code="F35")
        bits = parameter.detach().reshape(-1).contiguous().view(torch.uint8).numpy()
        digests[name] = hashlib.blake2b(bits.data, digest_size=16).digest()
    _align(model)
    return _Seen(digests, _logits(model), bool(getattr(model.config, "tie_word_embeddings", False)))


def _align(model: nn.Module) -> None:
    """Start every weight on a boundary of `ALIGNMENT` bytes, so that equal weights give equal
    logits, bit for bit.

    Weights that are mapped from a file start wherever its header ends. On some processors the
    address decides how a matrix product treats its edges, and thus the last bit of its sums.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


def _loaded(folder: Path, dtype: torch.dtype, rows: int | None) -> nn.Module:
    """The model, loaded by transformers itself; sharded files are loaded as a resumed run does."""
    from transformers import AutoConfig

    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        if rows is not None:
            config.vocab_size = rows
        kind = class_of(config)
        if not (folder / INDEX).exists() and not (folder / WHOLE).exists():
            return _loaded_from_shards(kind, config, folder, dtype)
        model, report = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except ModelError:
        raise
    except Exception as error:  # transformers, safetensors and torch each have their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"the model in {folder} cannot be loaded to check it: {reason}", hint=UNCHECKED
        ) from error
    holes = sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"])))
    if holes:
        raise ModelError(
            f"transformers misses {len(holes)} parameters in {folder}, first {holes[0]}"
        )
    return model


def _loaded_from_shards(kind: Any, config: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    with _no_random_weights():
        model: nn.Module = kind._from_config(config, dtype=dtype)
    model.tie_weights()  # type: ignore[operator]
    # a family writes a model without its head under the names of one with it
    prefix, stored = f"{kind.base_model_prefix}.", stored_tensors(folder)
    weights = own_weights(model)
    renamed = {name: prefix + name for name in weights if prefix + name in stored}
    fill({renamed.get(name, name): tensor for name, tensor in weights.items()}, folder)
    return model


def _no_random_weights() -> AbstractContextManager[None]:
    """Skip random initialisation of weights that will be read anyway,
    if transformers offers that."""
    from transformers import initialization

    return getattr(initialization, "no_init_weights", nullcontext)()


def _logits(model: nn.Module) -> torch.Tensor:
    """The model's output for each prompt, in float32: hidden states if it has no head."""
    config: Any = model.config
    length = min(LENGTH, getattr(config, "max_position_embeddings", LENGTH) or LENGTH)
    stream = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (PROMPTS, length), generator=stream)
    with torch.inference_mode():
        # some heads take only one
        rows = [model(input_ids=prompt[None], use_cache=False)[0] for prompt in tokens]
    return torch.cat(rows).float()
