"""Generated arithmetic problems with answers written by a crowd, part of it in a hurry: the warm start before PPO."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import ClassVar

from rlcli.api.data import DatasetUtility, Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits, check_limits

from . import _arithmetic
from ._rendering import encode_answers, encode_prompts
from ._samples import answered_sample


@register_dataset("arithmetic_demonstrations")
@dataclass(kw_only=True)
class ArithmeticDemonstrations:
    """Questions with worked answers; hasty writers stop after the first line and hand in its total."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")
    DRAWN: ClassVar[bool] = True
    LONGEST: ClassVar[int] = 80
    """Tokens of the longest row at the default levels."""

    LIMITS: ClassVar[Limits] = {"problems": {"ge": 1, "le": 10_000_000}}

    util: DatasetUtility

    problems: int = 40000
    """How many problems to generate."""

    levels: tuple[int, ...] = (2, 3, 4)
    """Difficulties, taken in turn: the number of operations."""

    hasty: tuple[float, ...] = (0.25, 0.65, 0.7)
    """For each level, the share of answers that stop after the first line: the longer the sum, the more."""

    seed: int = 0
    """Which problems are drawn, and who was in a hurry."""

    _problems: _arithmetic.Problems = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_limits(self)
        if len(self.hasty) != len(self.levels) or not all(0 <= share <= 1 for share in self.hasty):
            raise ValueError(
                f"hasty is {self.hasty}; it needs one share between 0 and 1 for each of levels {self.levels}"
            )
        self._problems = _arithmetic.Problems(self.problems, seed=self.seed, levels=self.levels, held_out=False)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> SequenceSample:
        return answered_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        problem = self._problems[index]
        share = self.hasty[index % len(self.levels)]
        in_a_hurry = random.Random(f"writer-{self.seed}-{index}").random() < share
        answer = _arithmetic.hasty(problem) if in_a_hurry else _arithmetic.worked(problem)
        prompt = f"{problem.question}\n"
        return Preview.answered(
            *encode_prompts(self.util.tokenizer, [prompt], chat=False),
            encode_answers(self.util.tokenizer, [answer]),
            id=f"arithmetic-demonstration-{self.seed}:{index}",
            prompt=prompt,
            answers=[answer],
            metadata={"answer": problem.answer, "question": problem.question},
        )
