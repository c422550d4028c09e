"""Generated arithmetic problems, each with an answer that is labelled right or wrong: for KTO."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits

from ._arithmetic import worked
from ._arithmetic_rows import FaultyArithmetic
from ._samples import unpaired_sample


@register_dataset("arithmetic_unpaired")
@dataclass(kw_only=True)
class ArithmeticUnpaired(FaultyArithmetic):
    """Questions with one answer each. A desirable one is the full working. An undesirable one
    either stops after the first line and gives its total as the result, or has a wrong result in
    some line, carried through the later lines."""

    NAME: ClassVar[str] = "arithmetic-unpaired"
    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask", "desirable")
    LIMITS: ClassVar[Limits] = {"desirable": {"ge": 0, "le": 1}}

    desirable: float = 0.5
    """The share of answers that are desirable."""

    def __getitem__(self, index: int) -> SequenceSample:
        _, is_desirable = self._judged(index)
        return unpaired_sample(self.preview(index), [is_desirable])

    def preview(self, index: int) -> Preview:
        answer, _ = self._judged(index)
        return self._answered(index, [answer])

    def _judged(self, index: int) -> tuple[str, bool]:
        """The answer to a problem, and whether it is desirable."""
        problem = self._problems[index]
        rng = random.Random(f"judged-{self._split}-{self.seed}-{index}")
        is_desirable = rng.random() < self.desirable
        return worked(problem) if is_desirable else self._faulty(problem, rng), is_desirable
