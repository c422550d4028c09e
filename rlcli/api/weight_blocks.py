"""Blocks of parameters: a rank's part of a model, whatever its layout,
and what two layouts have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Region = tuple[slice, ...]


class WeightBlock(NamedTuple):
    """A block of a parameter, or all of it. A tuple, because a plan makes very many."""

    name: str
    """The parameter's name in transformers."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    offsets: tuple[int, ...]
    """Where it begins in the whole."""
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> WeightBlock:
        return cls(name, tuple(shape), (0,) * len(shape), tuple(shape))

    @classmethod
    def of_region(cls, name: str, shape: Sequence[int], region: Region) -> WeightBlock:
        """`region` has both ends of every dimension."""
        return cls(
            name,
            tuple(shape),
            tuple(span.start for span in region),
            tuple(span.stop - span.start for span in region),
        )

    @property
    def numbers(self) -> int:
        return math.prod(self.sizes)

    def common(self, second: WeightBlock) -> WeightBlock | None:
        """The overlap of both blocks; None if there is none."""
        if self.name != second.name:
            return None
        region = []
        for mine, of_mine, theirs, of_theirs in zip(
            self.offsets, self.sizes, second.offsets, second.sizes, strict=True
        ):
            start, stop = max(mine, theirs), min(mine + of_mine, theirs + of_theirs)
            if stop <= start:
                return None
            region.append(slice(start, stop))
        return WeightBlock.of_region(self.name, self.shape, tuple(region))

    def of(self, name: str) -> WeightBlock:
        """The same block of another parameter, of the same shape."""
        return WeightBlock(name, self.shape, self.offsets, self.sizes)

    def along(self, axis: int, start: int, end: int) -> WeightBlock:
        """The part of it between two of its own positions along an axis."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[axis] += start
        sizes[axis] = end - start
        return WeightBlock(self.name, self.shape, tuple(offsets), tuple(sizes))

    def within(self, outer: WeightBlock) -> Region:
        """Its region in a tensor that holds `outer`."""
        ends = zip(self.offsets, self.sizes, outer.offsets, strict=True)
        return tuple(slice(at - start, at - start + size) for at, size, start in ends)
