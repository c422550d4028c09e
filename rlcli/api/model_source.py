"""Where the weights of a role come from, and how an engine reads its own part of them.

An engine builds the model on the meta device (`skeleton`), shards it, allocates its own part and
fills it (`fill`): no rank holds more of a sharded model than its part and one block of rows. A
library with a different weight layout reads tensors and slices by name (`read`).
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rlcli.api.headway import BYTES, doing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Region = Sequence[slice]
"""A part of a tensor: a slice of the rows, then of each other dimension;
dimensions that are left out are whole."""

Head = Literal["lm", "value"]

BLOCK = 1 << 20
"""Numbers of a parameter that are read or drawn at a time; one row if a row has more."""


class ModelSource(abc.ABC):
    """A model's configuration and its weights; any tensor or slice can be read by name.

    Names are those of the parameters of the transformers model that `skeleton` builds. What a
    source returns depends only on what it was made from, never on who reads which part.
    """

    config: Any
    """The transformers configuration, without dropout."""
    head: Head
    """What the model predicts: the next token, or one number per token."""
    dtype: torch.dtype
    """dtype of the stored weights; for random ones, that of their configuration, or float32. Saved
    models have it too, unless the recipe says otherwise."""
    lacks_head: bool = False
    """Whether the files that it reads have no value head, so that every value is 0 at first."""

    @abc.abstractmethod
    def skeleton(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A new model in evaluation mode: parameters of `dtype` on the meta device, tied where they
        should be, and real buffers on the CPU."""

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter, or of a buffer that is stored in the model's files."""

    @abc.abstractmethod
    def blocks(self, name: str, region: Region = ()) -> Iterator[tuple[int, torch.Tensor]]:
        """A part of a parameter or buffer, on the CPU in the source's dtype: consecutive blocks of
        rows, each with the index of its first row within the part. A tensor without dimensions is
        one block at 0. The part must not be empty.

        Raises ModelError if it cannot be read.
        """

    def read(self, name: str, region: Region = ()) -> torch.Tensor:
        """A part of a parameter or buffer in one piece, on the CPU. Raises ModelError."""
        sizes = [span.stop - span.start for span in bounds(region, self.shape(name))]
        if 0 in sizes:
            return torch.empty(sizes, dtype=self.dtype)
        pieces = [block for _, block in self.blocks(name, region)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def load(self, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The whole model. Raises ModelError."""
        lm = self.skeleton(dtype)
        materialize(lm, device)
        fill(lm, self)
        return lm


def open_source(
    origin: str | Mapping[str, Any],
    *,
    head: Head,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
) -> ModelSource:
    """The source of a role's weights, checked as far as possible without reading them.

    `origin` is a folder, a Hub id, or a transformers configuration with its `model_type` (random
    weights, drawn from `seed`). With `head="value"` the model predicts one number per token; a head
    that the origin does not have starts at zero. Raises ModelError:
    F32 if the tokenizer does not fit.
    """
    from transformers.utils import logging

    from rlcli.api.drawn_weights import DrawnSource
    from rlcli.api.stored_weights import StoredSource

    logging.set_verbosity_error()  # its reports and progress bars are not for our users
    logging.disable_progress_bar()
    if isinstance(origin, Mapping):
        return DrawnSource(origin, head, tokenizer, seed)
    return StoredSource(origin, head, tokenizer)


def materialize(lm: nn.Module, device: torch.device) -> None:
    """Allocate parameters that are on the meta device on `device`, and move the others there;
    tied ones stay tied."""
    places = list(parameter_places(lm).values())
    lm._apply(
        lambda tensor: (
            torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        )
    )
    for (first, first_name), *others in places:
        for module, name in others:
            setattr(module, name, getattr(first, first_name))


def parameter_places(lm: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Name of each parameter → the modules that have it (several if it is tied),
    each with its name there."""
    name_of = {id(parameter): name for name, parameter in lm.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in name_of.values()}
    for module in lm.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places[name_of[id(parameter)]].append((module, name))
    return places


def fill(lm: nn.Module, source: ModelSource) -> None:
    """Read this rank's part of every parameter, one block at a time. Raises ModelError.

    `lm` comes from `source.skeleton()`; it may have been sharded since, and has been materialized.
    """
    stored = lm.state_dict().keys()
    buffers = {name: buffer for name, buffer in lm.named_buffers() if name in stored}
    tensors = {**dict(lm.named_parameters()), **buffers}
    sizes = {name: local_part(tensor.detach())[0].nbytes for name, tensor in tensors.items()}
    with doing("loading weights", sum(sizes.values()), BYTES) as work:
        for name, tensor in tensors.items():
            fill_tensor(tensor.detach(), source, name)
            work.advance(sizes[name])


def fill_tensor(tensor: torch.Tensor, source: ModelSource, name: str) -> None:
    """Read this rank's part of a parameter into `tensor`."""
    local, region = local_part(tensor)
    for row, block in source.blocks(name, region) if local.numel() else ():
        target = local.narrow(0, row, len(block)) if local.dim() else local
        target.copy_(block)


def local_part(tensor: Any) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """This rank's part of a tensor, and the region of the whole that it covers."""
    if not hasattr(tensor, "placements"):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local(), tuple(
        slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)
    )


def bounds(region: Region, shape: Sequence[int]) -> tuple[slice, ...]:
    """The region with both ends of every dimension. Raises ValueError for a region outside the
    tensor."""
    full = []
    for span, size in itertools.zip_longest(region, shape, fillvalue=None):
        if size is None:
            raise ValueError(
                f"{len(region)} dimensions requested of a tensor of shape {list(shape)}"
            )
        start, stop, step = (span or slice(None)).indices(size)
        if step != 1 or (span is not None and (span.stop or 0) > size):
            raise ValueError(f"{span} is not a part of a dimension of {size}")
        full.append(slice(start, max(start, stop)))
    return tuple(full)


@dataclass(frozen=True)
class RowBlock:
    """Rows of a tensor that are read or drawn together."""

    number: int
    first: int
    """Its first row in the tensor."""
    size: int
    """Number of its rows."""
    selected: slice
    """The requested ones among its rows."""


def row_blocks(shape: Sequence[int], rows: slice) -> Iterator[RowBlock]:
    """The blocks that the given rows touch. Where blocks begin depends only on the shape."""
    per_block = max(1, BLOCK // max(1, math.prod(shape[1:])))
    for number in range(rows.start // per_block, -(-rows.stop // per_block)):
        first = number * per_block
        size = min(per_block, shape[0] - first)
        yield RowBlock(
            number, first, size, slice(max(rows.start - first, 0), min(rows.stop - first, size))
        )
