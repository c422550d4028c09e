"""Shared by the datasets of generated arithmetic problems."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.data import DatasetUtility, Preview
from rlcli.api.limits import Limits, check_arguments

from ._arithmetic import ArithmeticProblem, ArithmeticProblems, hasty, slipped
from ._rendering import encode_answers, encode_prompts


@dataclass(kw_only=True)
class ArithmeticRows:
    """Problems of one split, drawn lazily."""

    NAME: ClassVar[str]
    """Prefix of its rows' ids."""
    DRAWN: ClassVar[bool] = True
    PROMPT: ClassVar[str] = "{question}\n"
    LIMITS: ClassVar[Limits] = {"problems": {"ge": 1, "le": 10_000_000}}

    util: DatasetUtility

    problems: int = 4096
    """Number of problems to generate."""

    levels: tuple[int, ...] = (2, 3, 4)
    """Difficulties (numbers of operations), used in rotation."""

    held_out: bool = False
    """Use problems of the held-out split instead of the training split."""

    seed: int = 0
    """Seed of the problems drawn, and of everything else that is random."""

    _problems: ArithmeticProblems = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_arguments(self)
        self._problems = ArithmeticProblems(
            self.problems, seed=self.seed, levels=self.levels, held_out=self.held_out
        )

    def __len__(self) -> int:
        return len(self._problems)

    @property
    def _split(self) -> str:
        return "held-out" if self.held_out else "train"

    def _asked(self, index: int) -> Preview:
        """A row with its question only."""
        about = self._about(index)
        return Preview(
            sequences=encode_prompts(self.util.tokenizer, [about["prompt"]], chat=False), **about
        )

    def _answered(self, index: int, answers: list[str]) -> Preview:
        """A row with its question and answers to it."""
        about, tokenizer = self._about(index), self.util.tokenizer
        (prompt,) = encode_prompts(tokenizer, [about["prompt"]], chat=False)
        return Preview.answered(
            prompt, encode_answers(tokenizer, answers), answers=answers, **about
        )

    def _about(self, index: int) -> dict[str, Any]:
        problem: ArithmeticProblem = self._problems[index]
        return {
            "id": f"{self.NAME}-{self._split}-{self.seed}:{index}",
            "prompt": self.PROMPT.format(question=problem.question),
            "metadata": {"answer": problem.answer, "question": problem.question},
        }


@dataclass(kw_only=True)
class FaultyArithmetic(ArithmeticRows):
    """Problems that also have answers with a fault."""

    LIMITS: ClassVar[Limits] = {"hasty": {"ge": 0, "le": 1}}
    LONGEST: ClassVar[int] = 80
    """Tokens of the longest answer, including its question, at the default levels."""

    levels: tuple[int, ...] = (2, 3, 4)
    """Difficulties (numbers of operations, at least 2), used in rotation."""

    hasty: float = 0.5
    """The share of faulty answers that stop after the first line."""

    def __post_init__(self) -> None:
        if any(level < 2 for level in self.levels):
            raise ValueError(
                f"levels is {self.levels}; a hasty answer to a problem of one operation is correct"
            )
        super().__post_init__()

    def _faulty(self, problem: ArithmeticProblem, rng: random.Random) -> str:
        """An answer that stops after the first line and gives its total as the result, or has a
        wrong result in some line, carried through the later lines."""
        is_hasty = rng.random() < self.hasty
        return hasty(problem) if is_hasty else slipped(problem, rng)
