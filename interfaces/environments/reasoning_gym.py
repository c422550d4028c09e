"""reasoning-gym: scores answers to the problems of its tasks."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Examples, register_environment

FIELD = "reasoning_gym"
"""Field of a row with its task, the config of that, and the problem."""
LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Tasks for which the library evaluates an answer as a list."""
FORMULAS = (
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
)
"""Tasks for which the library has sympy evaluate an answer."""
FUNCTIONS = (
    *("exp", "log", "ln", "sqrt", "Abs", "sin", "cos", "tan", "cot", "sec", "csc"),
    *("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf"),
)
"""Functions that an answer may call."""


@dataclass(kw_only=True)
class ReasoningGym(Environment):
    """Scores the answer to a problem of the dataset `reasoning_gym` as the library does: from 0
    to 1."""

    REQUIRES: ClassVar[tuple[str, ...]] = ("reasoning-gym>=0.1.25,<0.2",)
    PRELOAD: ClassVar[tuple[str, ...]] = ("reasoning_gym",)
    REPRODUCIBLE: ClassVar[bool] = True
    EXAMPLES: ClassVar[Examples] = (
        {
            "row": {
                "reasoning_gym": {
                    "task": "chain_sum",
                    "config": {},
                    "entry": "{'question': '12 + 7 =', 'answer': '19', 'metadata': {}}",
                }
            },
            "turns": ["12+7 is <answer>19</answer>"],
        },
        {
            "row": {
                "reasoning_gym": {
                    "task": "countdown",
                    "config": {"max_value": 50},
                    "entry": "{'metadata': {'numbers': [3, 5, 7], 'target': 22}, 'answer': ''}",
                }
            },
            "turns": ["<answer>3*5+7</answer>"],
        },
    )

    answer_tag: str | None = "answer"
    """The answer is what comes between `<answer>` and `</answer>`, last in the response, which has
    none otherwise; null: the whole response is the answer."""

    _task: str = field(init=False, repr=False, default="")
    _problems: Any = field(init=False, repr=False, default=None)
    _entry: Mapping[str, Any] = field(init=False, repr=False, default_factory=dict)

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        if FIELD not in row:
            raise ValueError("the rows are not problems: use a dataset of type reasoning_gym")
        about = row[FIELD]
        self._task, self._entry = about["task"], ast.literal_eval(about["entry"])
        self._problems = _problems(self._task, repr(about["config"]))

    def score(self, answer: str) -> float:
        final = self._answer_in(answer)
        if final is not None and not _is_harmless(self._task, final):
            return 0.0
        try:
            return float(self._problems.score_answer(final, self._entry))
        except Exception:  # what no answer looks like; the library raises anything for it
            return 0.0

    def _answer_in(self, response: str) -> str | None:
        if self.answer_tag is None:
            return response.strip()
        _, opening, answer = response.rpartition(f"<{self.answer_tag}>")
        answer, closing, _ = answer.partition(f"</{self.answer_tag}>")
        return answer.strip() if opening and closing else None


@lru_cache(maxsize=16)
def _problems(task: str, config: str) -> Any:
    """What scores the answers to a task. It has no state, and takes time to make for some tasks."""
    from reasoning_gym import create_dataset

    return create_dataset(task, seed=0, size=1, **ast.literal_eval(config))


def _is_harmless(task: str, answer: str) -> bool:
    """Whether evaluating an answer, if the library does that, computes with numbers only."""
    if task in LISTS:
        return "(" not in answer
    if task not in FORMULAS:
        return True
    names = set(re.findall(r"[^\W\d]\w*", answer))
    called = set(re.findall(r"([^\W\d]\w*)\s*\(", answer))
    has_others = re.search(r"[^\w\s+\-*/^=.,()!]|__|\.\s*[^\W\d]|\)\s*\(", answer)
    return not has_others and names.isdisjoint(vars(builtins)) and called <= set(FUNCTIONS)


register_environment("reasoning_gym", ReasoningGym)
