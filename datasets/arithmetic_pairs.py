"""Generated arithmetic problems with a right and a wrong answer: what reward models and DPO learn from."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import ClassVar

from rlcli.api.data import DatasetUtility, Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits, check_limits

from . import _arithmetic
from ._rendering import encode_answers, encode_prompts
from ._samples import paired_sample


@register_dataset("arithmetic_pairs")
@dataclass(kw_only=True)
class ArithmeticPairs:
    """Questions with the whole working as the preferred answer. The rejected one is in a hurry, stops after the first
    line and hands in its total; or has a wrong result in some line, which the lines below it carry on."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask", "prompt_lens")
    PAIRS: ClassVar[str] = "pairs_per_problem"
    DRAWN: ClassVar[bool] = True
    LONGEST: ClassVar[int] = 80
    """Tokens of the longest answer with its question at the default levels."""

    LIMITS: ClassVar[Limits] = {
        "problems": {"ge": 1, "le": 10_000_000}, "hasty": {"ge": 0, "le": 1}, "pairs_per_problem": {"ge": 1, "le": 64},
    }  # fmt: skip

    util: DatasetUtility

    problems: int = 4096
    """How many problems to generate."""

    levels: tuple[int, ...] = (2, 3, 4)
    """Difficulties, taken in turn: the number of operations, at least 2."""

    hasty: float = 0.5
    """The share of rejected answers that stop after the first line."""

    pairs_per_problem: int = 1
    """How many rejected answers each problem has; the preferred one is always the same."""

    held_out: bool = False
    """Problems of the held-out split instead of the training split."""

    seed: int = 0
    """Which problems are drawn, and what the rejected answers are."""

    _problems: _arithmetic.Problems = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_limits(self)
        if any(level < 2 for level in self.levels):
            raise ValueError(f"levels is {self.levels}; a hasty answer to a problem of one operation is a right one")
        self._problems = _arithmetic.Problems(self.problems, seed=self.seed, levels=self.levels, held_out=self.held_out)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> SequenceSample:
        return paired_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        problem = self._problems[index]
        split = "held-out" if self.held_out else "train"
        rng = random.Random(f"rejected-{split}-{self.seed}-{index}")
        answers = []
        for _ in range(self.pairs_per_problem):
            is_hasty = rng.random() < self.hasty
            wrong = _arithmetic.hasty(problem) if is_hasty else _arithmetic.slipped(problem, rng)
            answers += [_arithmetic.worked(problem), wrong]
        prompt = f"{problem.question}\n"
        return Preview.answered(
            *encode_prompts(self.util.tokenizer, [prompt], chat=False),
            encode_answers(self.util.tokenizer, answers),
            id=f"arithmetic-pairs-{split}-{self.seed}:{index}",
            prompt=prompt,
            answers=answers,
            metadata={"answer": problem.answer, "question": problem.question},
        )
