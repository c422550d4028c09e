"""Writing safetensors files tensor by tensor: the header first, then each tensor at its place,
in any order."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np

from rlcli.api.weight_files import header
from rlcli.checkpoint.tensor_dtypes import Raw, cast, raw_type
from rlcli.checkpoint.tensor_files import (
    Extent,
    StoredTensor,
    TensorSpec,
    became_shorter,
    bytes_of,
    in_file_order,
    read_into,
)
from rlcli.errors import ModelError

CHUNK = 16 * 2**20
"""Bytes that are moved at a time."""

CAST_CHUNK = 2**20
"""Bytes whose type is changed at a time: few enough to stay in the processor's cache."""

MOST_SOURCES = 64
"""Files that are open for reading at a time."""

NO_KERNEL_COPY = (
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.ETXTBSY,
)
"""Errors of copy_file_range where the kernel or a filesystem does not support it."""

Progress = Callable[[int], None]
"""Called with the number of bytes written since the last call."""


@dataclass(frozen=True)
class FilePlan:
    """A file, and what it holds of which tensors: whole ones, or a rank's rows."""

    name: str
    tensors: tuple[TensorSpec, ...]
    starts: tuple[int, ...] = ()
    """First row of each in the whole tensor; empty: all are whole."""
    metadata: tuple[tuple[str, str], ...] = (("format", "pt"),)


class TensorWriter:
    """Writes the files of a folder. Every tensor that the plans name must be passed once,
    to `copy` or to `write`."""

    def __init__(self, folder: Path, plans: Sequence[FilePlan], progress: Progress):
        self._progress = progress
        self._parts: dict[str, list[tuple[int, Extent]]] = {}
        self._descriptors: dict[Path, int] = {}
        self._sources: dict[Path, int] = {}
        self._missing: set[str] = set()
        try:
            for plan in plans:
                self._begin(folder, plan)
        except BaseException:
            self._close()
            raise

    def copy(self, source: StoredTensor, output: TensorSpec) -> None:
        """Write a stored tensor, or its first rows, under another name or in another type."""
        extents = source.extents
        if extents is None:
            self.write(output, source.read(), source.spec.dtype)
        elif source.spec.dtype == output.dtype:
            for start, extent in self._consecutive(output, extents, output.bytes, CHUNK):
                self._copy_bytes(extent, output.name, start)
        else:
            self._copy_cast(source, output, extents)
        self._missing.discard(output.name)

    def write(self, output: TensorSpec, array: Raw, dtype: str) -> None:
        """Write bits of numbers in type `dtype`; rows beyond those of the output are left out."""
        rows = array[: output.shape[0]] if output.shape else array
        flat = np.ascontiguousarray(rows).reshape(-1)
        if flat.size != output.bytes // raw_type(output.dtype).itemsize:
            raise ModelError(
                f"{output.name} has shape {list(array.shape)}, not {list(output.shape)}"
            )
        size = raw_type(output.dtype).itemsize
        step = (CHUNK if dtype == output.dtype else CAST_CHUNK) // size
        for first in range(0, flat.size, step):
            converted = cast(flat[first : first + step], dtype, output.dtype, output.name)
            self._put(output.name, first * size, bytes_of(converted))
        self._missing.discard(output.name)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                if self._missing:
                    raise AssertionError(f"nothing was written for {min(self._missing)}")
                for descriptor in self._descriptors.values():
                    os.fsync(descriptor)
        finally:
            self._close()

    def _begin(self, folder: Path, plan: FilePlan) -> None:
        starts = dict(zip((spec.name for spec in plan.tensors), plan.starts, strict=False))
        specs = in_file_order(plan.tensors)
        head = header([(spec.name, spec.dtype, spec.shape) for spec in specs], dict(plan.metadata))
        path = folder / plan.name
        descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
        )
        self._descriptors[path] = descriptor
        at = _write_all(descriptor, memoryview(head), 0)
        os.truncate(descriptor, at + sum(spec.bytes for spec in specs))
        for spec in specs:
            row = spec.bytes // spec.shape[0] if spec.shape and spec.shape[0] else 0
            parts = self._parts.setdefault(spec.name, [])
            parts.append((starts.get(spec.name, 0) * row, Extent(path, at, spec.bytes)))
            at += spec.bytes
            self._missing.add(spec.name)

    @staticmethod
    def _consecutive(
        output: TensorSpec, extents: Sequence[Extent], limit: int, chunk: int
    ) -> Iterator[tuple[int, Extent]]:
        """Chunks of the sources with where each begins in the tensor, up to `limit` bytes of it."""
        at = 0
        for extent in extents:
            for offset in range(0, extent.bytes, chunk):
                if at >= limit:
                    return
                count = min(chunk, extent.bytes - offset, limit - at)
                yield at, Extent(extent.file, extent.start + offset, count)
                at += count
        if at != limit:
            raise ModelError(f"{output.name} is shorter than its header says")

    def _copy_cast(
        self, source: StoredTensor, output: TensorSpec, extents: Sequence[Extent]
    ) -> None:
        before, after = raw_type(source.spec.dtype), raw_type(output.dtype)
        limit = output.bytes // after.itemsize * before.itemsize
        for start, extent in self._consecutive(output, extents, limit, CAST_CHUNK):
            raw = np.empty(extent.bytes // before.itemsize, before)
            read_into(self._open(extent.file), extent, raw)
            converted = cast(raw, source.spec.dtype, output.dtype, output.name)
            self._put(output.name, start // before.itemsize * after.itemsize, bytes_of(converted))

    def _put(self, name: str, start: int, content: memoryview) -> None:
        """Write bytes of a tensor that begin at `start` in it, into whichever files hold them."""
        for target, begin, end in self._targets(name, start, len(content)):
            _write_all(self._descriptors[target.file], content[begin:end], target.start)
            self._progress(end - begin)

    def _copy_bytes(self, source: Extent, name: str, start: int) -> None:
        for target, begin, end in self._targets(name, start, source.bytes):
            extent = replace(source, start=source.start + begin, bytes=end - begin)
            _kernel_copy(
                self._open(extent.file), self._descriptors[target.file], extent, target.start
            )
            self._progress(end - begin)

    def _targets(self, name: str, start: int, count: int) -> Iterator[tuple[Extent, int, int]]:
        """Places in files for bytes [start, start + count) of a tensor, each with the bytes that
        belong there."""
        for offset, extent in self._parts[name]:
            begin, end = max(start, offset), min(start + count, offset + extent.bytes)
            if begin < end:
                yield (
                    replace(extent, start=extent.start + begin - offset, bytes=end - begin),
                    begin - start,
                    end - start,
                )

    def _open(self, file: Path) -> int:
        if file not in self._sources:
            if len(self._sources) >= MOST_SOURCES:
                os.close(self._sources.pop(next(iter(self._sources))))
            self._sources[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._sources[file]

    def _close(self) -> None:
        for descriptor in (*self._descriptors.values(), *self._sources.values()):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        self._sources.clear()


def rank_files(
    specs: Sequence[TensorSpec],
    ranks: int,
    metadata: Callable[[Mapping[str, Sequence[int]]], dict[str, str]],
) -> list[FilePlan]:
    """One file per rank, each with its block of every tensor's rows,
    divided as evenly as FSDP does.

    `metadata` makes a file's metadata from the offsets of its parts.
    """
    plans = []
    for rank in range(ranks):
        tensors, starts, offsets = [], [], {}
        for spec in specs:
            rows = spec.shape[0] if spec.shape else 1
            per_rank = -(-rows // ranks)
            first, last = min(rank * per_rank, rows), min((rank + 1) * per_rank, rows)
            if first < last or (rows == rank == 0):
                shape = (last - first, *spec.shape[1:]) if spec.shape else ()
                tensors.append(replace(spec, shape=shape))
                starts.append(first)
                offsets[spec.name] = [first, *[0] * (len(shape) - 1)] if shape else []
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        plans.append(
            FilePlan(name, tuple(tensors), tuple(starts), tuple(metadata(offsets).items()))
        )
    return plans


def whole_files(specs: Sequence[TensorSpec], largest: int) -> list[FilePlan]:
    """Files of whole tensors, in order, none beyond `largest` bytes unless it holds a single
    tensor."""
    files: list[list[TensorSpec]] = [[]]
    room = largest
    for spec in specs:
        if files[-1] and spec.bytes > room:
            files.append([])
            room = largest
        files[-1].append(spec)
        room -= spec.bytes
    if len(files) == 1:
        return [FilePlan("model.safetensors", tuple(files[0]))]
    count = len(files)
    names = (f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))
    return [FilePlan(name, tuple(content)) for name, content in zip(names, files, strict=True)]


def _kernel_copy(source: int, target: int, extent: Extent, at: int) -> None:
    """Let the kernel move the bytes; where it cannot, move them through memory."""
    done = 0
    while done < extent.bytes:
        try:
            count = os.copy_file_range(
                source, target, extent.bytes - done, extent.start + done, at + done
            )
        except OSError as error:
            if error.errno not in NO_KERNEL_COPY:
                raise
            break
        if count == 0:
            raise became_shorter(extent.file)
        done += count
    while done < extent.bytes:
        content = os.pread(source, min(CHUNK, extent.bytes - done), extent.start + done)
        if not content:
            raise became_shorter(extent.file)
        done = _write_all(target, memoryview(content), at + done) - at


def _write_all(descriptor: int, content: memoryview, at: int) -> int:
    """Write everything at an offset; returns the offset after it."""
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], at + done)
    return at + len(content)
