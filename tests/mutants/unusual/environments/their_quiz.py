"""A pub quiz: question after question, with a mark at the end."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Examples, Observation, register_environment
from rlcli.api.limits import Limits, check_arguments

PASS = "pass"
_QUESTIONS = [
    {"question": "Which planet is the largest?", "accept": ["Jupiter"]},
    {"question": "What is the capital of Peru?", "accept": ["Lima"]},
    {"question": "Who wrote Hamlet?", "accept": ["Shakespeare", "William Shakespeare"]},
    {"question": "What do bees make?", "accept": ["honey", "wax"]},
]
"""Of the examples."""


@dataclass(kw_only=True)
class Quiz(Environment):
    """Asks the questions of a row, one in each turn. Its `quiz` is a list of `{"question": …,
    "accept": […]}`, with all answers that are accepted.

    Case, blanks around an answer, a full stop after it and "a", "an" or "the" before it do not
    matter. A turn that says `pass` puts the question off until all others have been asked; each
    can be put off once, and counts as answered wrongly the next time. The quiz ends after the last
    question, or with wrong answer number `lives`. The reward comes at the end: the share of all
    questions that were answered rightly, or 0 if that is below `pass_mark`.
    """

    REPRODUCIBLE: ClassVar[bool] = True
    REWARDS: ClassVar[tuple[float, float]] = (0.0, 1.0)
    EXAMPLES: ClassVar[Examples] = (
        {
            "row": {"quiz": _QUESTIONS},
            "turns": ["Honey", " jupiter.\n", "William Shakespeare", "the lima"],
            "observed": [
                "Which planet is the largest?\n",
                "Who wrote Hamlet?\n",
                "What is the capital of Peru?\n",
                "The quiz is over.\n",
            ],
            "reward": 1.0,
        },
        {
            "row": {"quiz": _QUESTIONS},
            "turns": ["pass", "Saturn", "Shakespeare", "Lima", "pass"],
            "observed": [
                "Which planet is the largest?\n",
                "Who wrote Hamlet?\n",
                "What is the capital of Peru?\n",
                "What do bees make?\n",
                "The quiz is over.\n",
            ],
            "reward": 0.5,
        },
        {
            "row": {"quiz": _QUESTIONS},
            "turns": ["wax", "Venus", "Goethe"],
            "observed": [
                "Which planet is the largest?\n",
                "Who wrote Hamlet?\n",
                "The quiz is over.\n",
            ],
            "reward": 0.0,
        },
    )
    LIMITS: ClassVar[Limits] = {"lives": {"ge": 1}, "pass_mark": {"ge": 0, "le": 1}}

    lives: int = 2
    """The quiz ends with this many wrong answers."""

    pass_mark: float = 0.5
    """Lowest share of right answers that earns anything."""

    shuffled: bool = True
    """Ask the questions in an order drawn from the seed; false: in that of the row."""

    _queue: list[int] = field(init=False, repr=False, default_factory=list)
    """Numbers of the questions that are still to be asked, the current one first."""
    _quiz: list[Mapping[str, Any]] = field(init=False, repr=False, default_factory=list)
    _put_off: set[int] = field(init=False, repr=False, default_factory=set)
    _right: int = field(init=False, repr=False, default=0)
    _wrong: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        check_arguments(self)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        self._quiz = list(row["quiz"])
        if not self._quiz:
            raise ValueError("the quiz of the row has no questions")
        self._queue = list(range(len(self._quiz)))
        if self.shuffled:
            random.Random(seed).shuffle(self._queue)
        self._put_off, self._right, self._wrong = set(), 0, 0
        return f"A quiz of {len(self._quiz)} questions. Answer each, or say pass.\n" + self._asked()

    def step(self, action: str) -> Observation:
        number = self._queue.pop(0)
        if _plain(action) == PASS and number not in self._put_off:
            self._put_off.add(number)
            self._queue.append(number)
            return Observation(self._asked())
        if _plain(action) in map(_plain, self._quiz[number]["accept"]):
            self._right += 1
        else:
            self._wrong += 1
        if not self._queue or self._wrong >= self.lives:
            return Observation("The quiz is over.\n", done=True)
        return Observation(self._asked())

    def score(self, answer: str) -> float:
        share = self._right / len(self._quiz)
        return share if share >= self.pass_mark else 0.0

    def _asked(self) -> str:
        """The current question."""
        return f"{self._quiz[self._queue[0]]['question']}\n"


def _plain(answer: str) -> str:
    """An answer without what does not matter."""
    text = answer.strip().removesuffix(".").rstrip().casefold()
    return re.sub(r"^(a|an|the)\s+", "", text)


register_environment("their_quiz", Quiz)
