"""Tools that edit a text, until it is the one that is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Examples, register_environment
from rlcli.api.limits import Limits, check_arguments

LONGEST = 2000
"""Characters that a text may have."""


@dataclass(kw_only=True)
class MyStringEditor(Environment):
    """Turns a row's `text` into its `target`. Earns 1 less `edit_cost` for each edit that was made,
    at least 0, if the edited text is the target, and else 0; what the policy says is not looked at.
    """

    REPRODUCIBLE: ClassVar[bool] = True
    REWARDS: ClassVar[tuple[float, float]] = (0.0, 1.0)
    LIMITS: ClassVar[Limits] = {"edit_cost": {"ge": 0, "le": 1}, "max_edits": {"ge": 1}}
    EXAMPLES: ClassVar[Examples] = (
        {
            "row": {"text": "the cat sat", "target": "the dog sat"},
            "turns": [{"replace": {"old": "cat", "new": "dog"}}, "the dog sat"],
        },
        {
            "row": {"text": "abcd", "target": "xacd"},
            "turns": [
                {"insert": {"position": 0, "text": "x"}},
                {"delete": {"start": 2, "end": 3}},
                {"replace": {"old": "q", "new": "r"}},
                {"delete": {"start": 0, "end": 1}},
                {"insert": {"position": 0, "text": "x"}},
                "done",
            ],
        },
        {"row": {"text": "no", "target": "yes"}, "turns": ["yes"]},
    )

    edit_cost: float = 0.1
    """What each edit costs."""

    max_edits: int = 3
    """Number of edits after which others are refused."""

    _text: str = field(init=False, repr=False, default="")
    _target: str = field(init=False, repr=False, default="")
    _edits: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        check_arguments(self)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        self._text, self._target, self._edits = str(row["text"]), str(row["target"]), 0
        return f"Edit this text:\n{self._text}\nuntil it reads:\n{self._target}\n"

    def replace(self, old: str, new: str) -> str:
        """Replace the first occurrence of a text; returns the edited text."""
        if not old or old not in self._text:
            raise ValueError("there is no such text")
        return self._edited(self._text.replace(old, new, 1))

    def insert(self, position: int, text: str) -> str:
        """Insert a text before the character at a position from 0; returns the edited text."""
        if not 0 <= position <= len(self._text):
            raise ValueError(f"the position must be 0 to {len(self._text)}")
        return self._edited(self._text[:position] + text + self._text[position:])

    def delete(self, start: int, end: int) -> str:
        """Delete the characters from start up to, but without, end; returns the edited text."""
        if not 0 <= start < end <= len(self._text):
            raise ValueError(f"0 <= start < end <= {len(self._text)} must hold")
        return self._edited(self._text[:start] + self._text[end:])

    def _edited(self, text: str) -> str:
        if self._edits >= self.max_edits:
            raise ValueError(f"{self.max_edits} edits were made; no more are allowed")
        if len(text) > LONGEST:
            raise ValueError(f"a text may have {LONGEST} characters")
        self._text, self._edits = text, self._edits + 1
        return text

    def score(self, answer: str) -> float:
        return max(0.0, 1 - self.edit_cost * self._edits) if self._text == self._target else 0.0


register_environment("my_string_editor", MyStringEditor)
