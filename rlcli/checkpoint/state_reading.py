"""Reads what `state` has written back into an engine's tensors, on any number of ranks.

It goes through torch.distributed.checkpoint, which gives every rank its part of what another number
of ranks wrote. That takes the headers of all files. A rank that resumes with the layout of the
checkpoint opens only the files that hold its blocks: its own, and those of the ranks that write
what it shares with them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlcli.api.block_parts import BlockPart
from rlcli.api.headway import BYTES, Headway, doing
from rlcli.api.weight_files import read_head
from rlcli.checkpoint.state import WHOLE, Tensors, local_blocks
from rlcli.checkpoint.tensor_files import SHARDING
from rlcli.checkpoint.verify import writer_of
from rlcli.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


def fill(tensors: Tensors, folder: Path, writers: Collection[int] = ()) -> None:
    """Read into live tensors, in place; each rank reads its part. Raises ModelError if one is
    missing or has another shape.

    `writers`: ranks whose files hold all of it if the layout is that of the checkpoint. Then no
    other file is opened.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    # of others, this rank has no part
    tensors = {name: tensor for name, tensor in tensors.items() if _blocks(tensor)}
    reader = _reader(tensors, folder, writers)
    stored = reader.read_metadata().state_dict_metadata
    _check_shapes(tensors, stored, folder)
    blocks = (local for tensor in tensors.values() for local, _ in local_blocks(tensor))
    size = sum(local.nbytes for local in blocks)
    try:
        # without a process group it warns that there is one process
        with doing("reading the checkpoint", size, BYTES) as work, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            load(dict(tensors), storage_reader=reader, planner=_planner(work), no_dist=True)
    except CheckpointException as error:
        raise ModelError(
            f"{folder} cannot be read: {next(iter(error.failures.values()))[0]}"
        ) from error


def _check_shapes(tensors: Tensors, stored: Mapping[str, Any], folder: Path) -> None:
    """Raises ModelError."""
    for name, tensor in tensors.items():
        if name not in stored:
            hint = "the checkpoint belongs to another model"
            raise ModelError(f"{folder} has no {name}", hint=hint)
        if tuple(stored[name].size) != tuple(tensor.shape):
            shape = tuple(stored[name].size)
            raise ModelError(
                f"{name} has shape {shape} in {folder}, and {tuple(tensor.shape)} in the model"
            )


def _reader(tensors: Tensors, folder: Path, writers: Collection[int]) -> Any:
    """Reads from the files of the `writers` if these hold all blocks of the tensors,
    else from all files."""
    files = sorted(folder.glob("*.safetensors"))
    near = [file for file in files if writer_of(file.name) in writers]
    if near:
        reader = _reader_of(folder, near)
        if _holds_all(reader.read_metadata(), _whole_shapes(near), tensors):
            return reader
    return _reader_of(folder, files)


def _holds_all(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], tensors: Tensors) -> bool:
    """Whether there is a block for each of the tensors' own, of a tensor of the same shape; if so,
    the metadata, which are of some files only, are given the shapes of the whole tensors."""
    stored: Any = metadata.state_dict_metadata
    for name, tensor in tensors.items():
        if name not in stored or shapes.get(name) != tuple(tensor.shape):
            return False
        blocks = {(tuple(block.offsets), tuple(block.sizes)) for block in stored[name].chunks}
        if not blocks.issuperset(_blocks(tensor)):
            return False
        stored[name].size = torch.Size(shapes[name])
    return True


def _blocks(tensor: torch.Tensor | BlockPart) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and shapes of the blocks that this rank holds."""
    return [
        (offsets, tuple(local.shape)) for local, offsets in local_blocks(tensor) if local.numel()
    ]


def _whole_shapes(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Name → shape of the whole tensor, if files of parts have it; those of earlier versions do
    not."""
    shapes = {}
    for file in files:
        described = json.loads(read_head(file).metadata.get(SHARDING, "{}"))
        shapes.update(
            {name: tuple(entry[WHOLE]) for name, entry in described.items() if WHOLE in entry}
        )
    return shapes


def _reader_of(folder: Path, files: Sequence[Path]) -> Any:
    """torch's reader, which would read the headers of all files in the folder,
    and read them twice."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    class Reader(HuggingFaceStorageReader):
        def __init__(self) -> None:
            super().__init__(str(folder))
            self.fs = _Listing(files)  # type: ignore[assignment]
            self._metadata: Metadata | None = None

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            if self._metadata is None:
                self._metadata = super().read_metadata()
            return self._metadata

    return Reader()


class _Listing:
    """A folder in which only some files exist."""

    def __init__(self, files: Sequence[Path]):
        self._files = [str(file) for file in files]

    def ls(self, path: str) -> list[str]:
        return self._files


def _planner(work: Headway) -> Any:
    """Reads into any object that lists its chunks, as `BlockPart` does; the default planner
    supports only tensors, because it first looks through nested dictionaries. It counts the bytes
    that are read."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.utils import find_tensor_shard

    class Flat(DefaultLoadPlanner):
        def set_up_planner(
            self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
        ) -> None:
            self.state_dict = self.original_state_dict = state_dict
            self.metadata, self.is_coordinator = metadata, is_coordinator

        def lookup_tensor(self, index: Any) -> torch.Tensor:
            return find_tensor_shard(self.state_dict[index.fqn], index)

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            work.advance(tensor.nbytes)

    return Flat(flatten_state_dict=False, flatten_sharded_tensors=False)
