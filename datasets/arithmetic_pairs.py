"""Generated arithmetic problems with a right and a wrong answer: for reward models and DPO."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits

from ._arithmetic import worked
from ._arithmetic_rows import FaultyArithmetic
from ._samples import paired_sample


@register_dataset("arithmetic_pairs")
@dataclass(kw_only=True)
class ArithmeticPairs(FaultyArithmetic):
    """Questions with the full working as the preferred answer. The rejected one either stops after
    the first line and gives its total as the result, or has a wrong result in some line, carried
    through the later lines."""

    NAME: ClassVar[str] = "arithmetic-pairs"
    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask", "prompt_lens")
    PAIRS: ClassVar[str] = "pairs_per_problem"
    LIMITS: ClassVar[Limits] = {"pairs_per_problem": {"ge": 1, "le": 64}}

    pairs_per_problem: int = 1
    """Number of rejected answers per problem; the preferred one is always the same."""

    def __getitem__(self, index: int) -> SequenceSample:
        return paired_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        problem = self._problems[index]
        rng = random.Random(f"rejected-{self._split}-{self.seed}-{index}")
        answers = []
        for _ in range(self.pairs_per_problem):
            answers += [worked(problem), self._faulty(problem, rng)]
        return self._answered(index, answers)
