"""Generated arithmetic problems with worked answers, some deliberately careless:
the warm start for PPO."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._arithmetic import hasty, worked
from ._arithmetic_rows import ArithmeticRows
from ._samples import answered_sample


@register_dataset("arithmetic_demonstrations")
@dataclass(kw_only=True)
class ArithmeticDemonstrations(ArithmeticRows):
    """Questions with worked answers; careless ones stop after the first line and give its total as
    the result."""

    NAME: ClassVar[str] = "arithmetic-demonstration"
    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")
    PAIRS: ClassVar[str] = ""
    LONGEST: ClassVar[int] = 80
    """Tokens of the longest row at the default levels."""

    problems: int = 40000
    """Number of problems to generate."""

    hasty: tuple[float, ...] = (0.25, 0.65, 0.7)
    """For each level, the share of answers that stop after the first line:
    higher for longer sums."""

    def __post_init__(self) -> None:
        if len(self.hasty) != len(self.levels) or not all(0 <= share <= 1 for share in self.hasty):
            raise ValueError(
                f"hasty is {self.hasty}; it needs one share between 0 and 1 for each "
                f"of levels {self.levels}"
            )
        super().__post_init__()

    def __getitem__(self, index: int) -> SequenceSample:
        return answered_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        share, problem = self.hasty[index % len(self.levels)], self._problems[index]
        in_a_hurry = random.Random(f"writer-{self.seed}-{index}").random() < share
        return self._answered(index, [hasty(problem) if in_a_hurry else worked(problem)])
