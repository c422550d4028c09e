"""Generated arithmetic problems with answers written by a crowd, part of it in a hurry: the warm start before PPO."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from . import _arithmetic


@register_dataset("arithmetic_demonstrations")
@dataclass(kw_only=True)
class ArithmeticDemonstrations:
    """Questions with worked answers; hasty writers stop after the first line and hand in its total."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")

    util: DatasetUtility

    problems: int = 20000
    """How many problems to generate."""

    levels: tuple[int, ...] = (1, 2, 3, 4)
    """Difficulties, taken in turn: the number of operations."""

    hasty: float = 0.65
    """Share of the answers that stop after the first line."""

    seed: int = 0
    """Which problems are drawn, and who was in a hurry."""

    _problems: list[_arithmetic.Problem] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.hasty <= 1:
            raise ValueError(f"hasty is {self.hasty}; it is a share between 0 and 1")
        self._problems = _arithmetic.problems(self.problems, seed=self.seed, levels=self.levels, held_out=False)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> SequenceSample:
        problem = self._problems[index]
        in_a_hurry = random.Random(f"writer-{self.seed}-{index}").random() < self.hasty
        answer = _arithmetic.hasty(problem) if in_a_hurry else _arithmetic.worked(problem)
        prompt = self.util.tokenizer(f"{problem.question}\n").input_ids
        response = self.util.tokenizer(answer, add_special_tokens=False).input_ids
        tokens = torch.tensor([*prompt, *response, self.util.tokenizer.eos_token_id])
        return SequenceSample.from_default(
            ids=[f"arithmetic-demonstration-{self.seed}:{index}"],
            seqlens=[len(tokens)],
            data={"packed_input_ids": tokens, "prompt_mask": torch.arange(len(tokens)) < len(prompt)},
            metadata={"answer": [problem.answer], "question": [problem.question]},
        )
