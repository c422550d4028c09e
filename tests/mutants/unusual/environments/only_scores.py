"""No tools and no turns: an answer is compared with the row's."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Examples, register_environment


@functools.cache
def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold().strip()


@dataclass(kw_only=True)
class OnlyScores(Environment):
    """Scores an answer."""

    REPRODUCIBLE: ClassVar[bool] = True
    REWARDS: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    EXAMPLES: ClassVar[Examples] = (
        {"row": {"answer": "Yes"}, "turns": ["yes"]},
        {"row": {"answer": "Yes"}, "turns": ["no"]},
    )

    _answer: str = field(init=False, repr=False, default="")

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        self._answer = _plain(row["answer"])
        return None

    def score(self, answer: str) -> float:
        return 1 if _plain(answer) == self._answer else -1


register_environment("only_scores", OnlyScores)
