"""Generated arithmetic problems with a right and a wrong answer: for reward models and DPO."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits

from ._arithmetic import hasty, slipped, worked
from ._arithmetic_rows import ArithmeticRows
from ._samples import paired_sample


@register_dataset("arithmetic_pairs")
@dataclass(kw_only=True)
class ArithmeticPairs(ArithmeticRows):
    """Questions with the full working as the preferred answer. The rejected one either stops after
    the first line and gives its total as the result, or has a wrong result in some line, carried
    through the later lines."""

    NAME: ClassVar[str] = "arithmetic-pairs"
    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask", "prompt_lens")
    PAIRS: ClassVar[str] = "pairs_per_problem"
    LONGEST: ClassVar[int] = 80
    """Tokens of the longest answer, including its question, at the default levels."""

    LIMITS: ClassVar[Limits] = {
        "hasty": {"ge": 0, "le": 1},
        "pairs_per_problem": {"ge": 1, "le": 64},
    }

    levels: tuple[int, ...] = (2, 3, 4)
    """Difficulties (numbers of operations, at least 2), used in rotation."""

    hasty: float = 0.5
    """The share of rejected answers that stop after the first line."""

    pairs_per_problem: int = 1
    """Number of rejected answers per problem; the preferred one is always the same."""

    def __post_init__(self) -> None:
        if any(level < 2 for level in self.levels):
            raise ValueError(
                f"levels is {self.levels}; a hasty answer to a problem of one operation is correct"
            )
        super().__post_init__()

    def __getitem__(self, index: int) -> SequenceSample:
        return paired_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        problem = self._problems[index]
        rng = random.Random(f"rejected-{self._split}-{self.seed}-{index}")
        answers = []
        for _ in range(self.pairs_per_problem):
            is_hasty = rng.random() < self.hasty
            answers += [worked(problem), hasty(problem) if is_hasty else slipped(problem, rng)]
        return self._answered(index, answers)
