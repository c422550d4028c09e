"""Rule-based reward for multiple-choice questions: does the response settle on the right letter?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.interface import Example, register_interface
from rlcli.errors import DataError

from .rewards._text_reward import TextReward

STATED = re.compile(r"(?:(?i:\banswer(?: is)?)\s*:?|\\boxed|####)\W{0,4}([A-H])\b")
ALONE = re.compile(r"\W*([A-Ha-h])\W*")
LABELLED = re.compile(r"\W*([A-Ha-h])(?:[.):].*|\W*)", re.DOTALL)
"""The answer of a row: `B`, `(B)` or `B. Paris`."""


@dataclass(kw_only=True)
class ChoiceReward(TextReward):
    """Compares the last option that a response gives as its answer with the letter in the row's
    `answer`."""

    EXAMPLES: ClassVar[tuple[Example, ...]] = (
        {
            "row": {"answer": "B"},
            "right": "A is too small. The answer is (B).",
            "wrong": "B is too small. The answer is (C).",
        },
        {
            "row": {"answer": "A. Paris"},
            "right": "The answer is C. No, wait: the answer is A.",
            "wrong": "The answer is A. No, wait: the answer is C.",
        },
        {"row": {"answer": "(D)"}, "right": "d", "wrong": "I do not know."},
    )

    unclear_reward: float = 0.0
    """Reward of a response that names no option as its answer."""

    def score(self, response: str, answer: str) -> float:
        gold = LABELLED.fullmatch(answer)
        if gold is None:
            message = f"the answer {answer!r} is not the letter of an option"
            raise DataError(message, hint="give A, (A) or A. with its text", code="F31")
        options = _options(response)
        if not options:
            return self.unclear_reward
        return float(options[-1] == gold[1].upper())


def _options(response: str) -> list[str]:
    """The letters that a response gives as its answer, in order."""
    alone = ALONE.fullmatch(response)
    return [alone[1].upper()] if alone else STATED.findall(response)


register_interface("our_choice_reward", ChoiceReward)
