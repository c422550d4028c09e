"""Parameters under two names: ours, which are the same for every model family and split whatever
can be split, and those of a library ("theirs"), which may hold the same numbers in another form.

A `Link` maps one parameter of theirs to those of ours that it holds; a `Layout` is all links of a
model, and converts any subset of its parameters. Arrays may be numpy's or torch's: numbers are
moved and never computed with, so a round trip preserves every bit.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.errors import ModelError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Link:
    """One parameter of theirs, and those of ours that it holds.

    Theirs is, from the outside in: transposed, a stack of experts, groups of rows, and matrices
    stacked by rows. Each may be absent; with none of them, theirs is ours under another name.
    """

    theirs: str
    ours: tuple[str, ...]
    """Expert by expert, and for each expert from top to bottom."""
    rows: tuple[int, ...] = ()
    """Number of rows of each stacked matrix, or of elements of each vector;
    empty for a single one."""
    experts: int = 0
    """Length of axis 0 if that axis counts experts."""
    transposed: bool = False
    """Whether theirs holds a matrix as [in, out] instead of [out, in]."""
    groups: int = 1
    """How many times the matrices alternate, each time with an equal share of their rows."""

    def separate(self, array: Any) -> dict[str, Any]:
        """Split theirs into ours, as views where arrays allow it. Raises ModelError for an
        impossible shape."""
        self._check(tuple(array.shape))
        parts = []
        for matrix in array if self.experts else [array]:
            upright = _transposed(matrix) if self.transposed and matrix.ndim > 1 else matrix
            parts += _split(upright, self.rows, self.groups) if self.rows else [upright]
        return dict(zip(self.ours, parts, strict=True))

    def join(self, parts: Mapping[str, Any]) -> Any:
        """Join ours into theirs; all of `ours` must be among `parts`."""
        matched = [parts[name] for name in self.ours]
        each = len(self.rows) or 1
        matrices = [
            _joined(matched[first : first + each], self.groups)
            for first in range(0, len(matched), each)
        ]
        joined = matrices[0]
        if self.experts:
            joined = _concatenated(matrices).reshape(self.experts, -1, *joined.shape[1:])
        return _transposed(joined) if self.transposed and matched[0].ndim > 1 else joined

    def separate_shapes(self, shape: Shape) -> dict[str, Shape]:
        """The shapes that `separate` returns."""
        self._check(shape)
        matrix = shape[1:] if self.experts else shape
        if self.transposed and len(matrix) > 1:
            matrix = (*matrix[:-2], matrix[-1], matrix[-2])
        shapes = [(rows, *matrix[1:]) for rows in self.rows] or [matrix]
        return dict(zip(self.ours, shapes * (self.experts or 1), strict=True))

    def join_shape(self, parts: Mapping[str, Shape]) -> Shape:
        """The shape that `join` returns."""
        shape = parts[self.ours[0]]
        if self.rows:
            shape = (sum(self.rows), *shape[1:])
        if self.transposed and len(shape) > 1:
            shape = (*shape[:-2], shape[-1], shape[-2])
        joined = (self.experts, *shape) if self.experts else shape
        if self.separate_shapes(joined) != {name: tuple(parts[name]) for name in self.ours}:
            raise ModelError(
                f"{self.theirs} cannot be made: its parts have shapes {_listed(parts, self.ours)}"
            )
        return joined

    def _check(self, shape: Shape) -> None:
        stacked = self.experts == 0 or (len(shape) > 0 and shape[0] == self.experts)
        matrix = shape[1:] if self.experts else shape
        side = (matrix[-1] if self.transposed and len(matrix) > 1 else matrix[0]) if matrix else 0
        if not stacked or (self.rows and side != sum(self.rows)):
            expected = f"{self.experts} experts" if not stacked else f"{sum(self.rows)} rows"
            raise ModelError(
                f"{self.theirs} has shape {list(shape)}; its configuration says {expected}",
                hint="config.json may belong to another model",
            )


class Layout:
    """All parameters of a model as a library holds them, each linked to ours."""

    def __init__(self, links: Iterable[Link]):
        self.links = tuple(links)
        self.of_theirs = {link.theirs: link for link in self.links}
        self.of_ours = {name: link for link in self.links for name in link.ours}

    def to_ours(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """Ours for any subset of theirs. Raises ModelError for a name that the layout does not
        have."""
        ours: dict[str, Any] = {}
        for name, array in theirs.items():
            ours |= self._link(self.of_theirs, name).separate(array)
        return ours

    def to_theirs(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        """Theirs for any subset of ours that holds all or none of what belongs `together`.
        Raises ModelError."""
        links = dict.fromkeys(self._link(self.of_ours, name) for name in ours)
        for link in links:
            self.refuse_torn(link, ours)
        return {link.theirs: link.join(ours) for link in links}

    def together(self, name: str) -> tuple[str, ...]:
        """All parameters of ours that are in the same one of theirs as `name`, itself included."""
        return self._link(self.of_ours, name).ours

    def refuse_torn(self, link: Link, ours: Iterable[str]) -> None:
        """Raise ModelError if some of a link's parts are missing."""
        present = set(ours)
        missing = [name for name in link.ours if name not in present]
        if missing:
            raise ModelError(
                f"{link.theirs} needs {', '.join(missing[:3])}, which "
                f"{'is' if len(missing) == 1 else 'are'} not there"
            )

    @staticmethod
    def _link(table: Mapping[str, Link], name: str) -> Link:
        if name not in table:
            raise ModelError(
                f"this model has no parameter {name}",
                hint="the configuration may belong to another model",
            )
        return table[name]


def _split(array: Any, rows: Sequence[int], groups: int) -> list[Any]:
    ends = [sum(rows[: index + 1]) for index in range(len(rows))]
    if groups == 1:
        return [array[end - count : end] for end, count in zip(ends, rows, strict=True)]
    grouped = array.reshape(groups, -1, *array.shape[1:])
    parts = [
        grouped[:, (end - count) // groups : end // groups]
        for end, count in zip(ends, rows, strict=True)
    ]
    return [piece.reshape(-1, *array.shape[1:]) for piece in parts]


def _transposed(array: Any) -> Any:
    return array.swapaxes(-1, -2)


def _joined(arrays: Sequence[Any], groups: int) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    if groups == 1:
        return _concatenated(arrays)
    grouped = [array.reshape(groups, -1, *array.shape[1:]) for array in arrays]
    return _concatenated(grouped, 1).reshape(-1, *arrays[0].shape[1:])


def _concatenated(arrays: Sequence[Any], axis: int = 0) -> Any:
    """Concatenate with the library that the arrays belong to; if it is torch,
    it has been imported already."""
    library = importlib.import_module("torch" if hasattr(arrays[0], "requires_grad") else "numpy")
    return library.concatenate(list(arrays), axis)


def _listed(shapes: Mapping[str, Shape], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {list(shapes[name])}" for name in names[:4])
