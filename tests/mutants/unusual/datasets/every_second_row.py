"""Every second problem of `arithmetic`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.data import Preview, register_dataset

from .arithmetic import Arithmetic


@register_dataset("every_second_row")
@dataclass(kw_only=True)
class EverySecondRow(Arithmetic):
    """Half as long as its parent."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)

    problems: int = 64
    """Problems, of which every second is used."""

    def __len__(self) -> int:
        return self.problems // 2

    def preview(self, index: int) -> Preview:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return super().preview(2 * index)
