"""Writing a model for transformers, one parameter at a time: no process ever holds it whole.

The headers of all files are planned on the meta device; then the parameters arrive one at a time,
and their bytes are written where the headers say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rlcli.api.weight_files import INDEX, WHOLE, header
from rlcli.errors import ModelError

LARGEST_FILE = 5 * 10**9
"""Largest size in bytes; the rest goes to another file."""

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Type in torch → type in a safetensors header."""


def write_weights(
    lm: Any, parameters: Iterable[tuple[str, torch.Tensor]], folder: Path, dtype: torch.dtype
) -> None:
    """Write the files that `from_pretrained` reads, floating-point numbers as `dtype`, except those
    that the model's class keeps in float32.

    `parameters` are those of `lm`, whole, by name and in its order; of `lm` itself, only names,
    shapes and buffers are used. Holds one of them at a time, or all that form one tensor of a file.
    Raises ModelError for a number that is too large for `dtype`.
    """
    plan = _Plan(lm, dtype)
    with ExitStack() as files:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for file, tensors in plan.files.items():
            opened = files.enter_context((folder / file).open("xb"))
            opened.write(
                header([(name, CODES[t.dtype], tuple(t.shape)) for name, t in tensors.items()])
            )
            starts = accumulate((t.nbytes for t in tensors.values()), initial=opened.tell())
            places |= {name: (opened, start) for name, start in zip(tensors, starts, strict=False)}
        for name, tensor in plan.converted(_with_buffers(lm, parameters)):
            _write(*places[name], tensor)
    write_index(plan.files, folder)


def write_index(files: Mapping[str, Mapping[str, torch.Tensor]], folder: Path) -> None:
    """Write which tensor is in which file, if there are several files."""
    if len(files) > 1:
        total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
        places = {name: file for file, tensors in files.items() for name in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def own_weights(lm: Any) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and the buffers that are stored in the model's files,
    as they are."""
    stored = lm.state_dict().keys()
    buffers = {name: buffer for name, buffer in lm.named_buffers() if name in stored}
    return {
        name: tensor.detach() for name, tensor in {**dict(lm.named_parameters()), **buffers}.items()
    }


def _with_buffers(
    lm: Any, parameters: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters, then the buffers that are stored in the model's files."""
    yield from parameters
    named = {name for name, _ in lm.named_parameters()}
    yield from ((name, tensor) for name, tensor in own_weights(lm).items() if name not in named)


class _Plan:
    """The stored tensors that the weights become, and the file of each."""

    def __init__(self, lm: Any, dtype: torch.dtype):
        self._lm = lm
        self._dtype = dtype
        self._kept_wide = kept_wide(lm, dtype)
        weights = _with_buffers(lm, lm.named_parameters())
        meta = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in weights}
        self._groups = groups_in_files(lm, meta)
        files = in_files(dict(self.converted(meta.items())))
        self.files = {file: _widest_first(tensors) for file, tensors in files.items()}
        """File → its tensors on the meta device, in the order in which it holds them."""

    def converted(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the files, each as soon as all weights that it is made of have arrived."""
        waiting: dict[str, torch.Tensor] = {}
        for name, weight in weights:
            waiting[name] = weight
            group = self._groups[name]
            if all(member in waiting for member in group):
                files = as_stored(self._lm, {member: waiting.pop(member) for member in group})
                dtype = torch.float32 if any(map(self._kept_wide, group)) else self._dtype
                yield from ((new, _in_dtype(new, tensor, dtype)) for new, tensor in files.items())
        if waiting:
            raise AssertionError(f"{min(waiting)} needs weights that were not given")


def kept_wide(lm: Any, dtype: torch.dtype) -> Callable[[str], object]:
    """Whether transformers keeps a weight in float32 in a model of type `dtype`, by its name: with
    the bias of a router in 16 bits, tokens go to other experts. `lm`: the model, or its class."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import build_glob_alternation

    patterns = list(PreTrainedModel._get_dtype_plan(lm, dtype))
    return build_glob_alternation(patterns)[0].search if patterns else lambda name: False


def _widest_first(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In an order in which the numbers of a file are aligned."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


def groups_in_files(lm: Any, meta: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    """Weight → the weights that files hold in one tensor with it, itself included."""
    if getattr(lm, "_weight_conversions", None) == []:
        return {name: (name,) for name in meta}
    shapes = {name: tensor.shape for name, tensor in as_stored(lm, dict(meta)).items()}
    groups: dict[str, list[str]] = {}
    for name, tensor in meta.items():
        alone = as_stored(lm, {name: tensor})
        is_enough = all(shapes.get(new) == converted.shape for new, converted in alone.items())
        groups.setdefault(f"alone {name}" if is_enough else f"part of {min(alone)}", []).append(
            name
        )
    return {name: tuple(group) for group in groups.values() for name in group}


def as_stored(lm: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under the names, and in the form, of the family's files,
    or of the files they were read from."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(lm, weights)


def in_files(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Assign tensors to files in their order, as many per file as fit."""
    files: list[dict[str, torch.Tensor]] = [{}]
    room = LARGEST_FILE
    for name, tensor in tensors.items():
        if tensor.nbytes > room and files[-1]:
            files.append({})
            room = LARGEST_FILE
        files[-1][name] = tensor
        room -= tensor.nbytes
    if len(files) == 1:
        return {WHOLE: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": content
        for number, content in enumerate(files, 1)
    }


def _in_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    if (
        torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
        and not converted.is_meta
        and not converted.isfinite().all()
    ):
        raise ModelError(
            (
                f"{name} holds {float(tensor.abs().max()):.4g}, which is too large for "
                f"{str(dtype).removeprefix('torch.')}"
            ),
            hint="bfloat16 has the range of float32: set checkpoint.save_dtype",
        )
    return converted


def _write(file: BinaryIO, start: int, tensor: torch.Tensor) -> None:
    # A copy, because numpy would permanently prevent the storage of an engine's own weight from
    # being resized.
    flat = tensor.to("cpu", copy=True).contiguous().reshape(-1)
    file.seek(start)
    file.write(flat.view(torch.uint8).numpy().data)
