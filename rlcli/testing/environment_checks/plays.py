"""Episodes that checks play with an environment, and what they lead to."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from rlcli.api.environment import Environment, Observation, call_tool, has_score, is_game

Turn = str | Mapping[str, Mapping[str, Any]]
"""What a policy does in a turn: a text, or calls, a tool with its arguments each."""
Trace = list[list[str]]
"""What an episode leads to, in texts: (the method or turn, its result) each."""

LONGEST_SHOWN = 60
"""Characters of a result in a message."""


@dataclass(frozen=True)
class Script:
    """An episode to play."""

    row: Mapping[str, Any]
    turns: tuple[Turn, ...]
    seed: int = 1


@dataclass(frozen=True)
class CallResult:
    """What a call of an environment returned or raised."""

    value: Any = None
    error: BaseException | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        return json.dumps(self.value, default=repr)


def attempt(method: Callable[..., Any], *arguments: Any) -> CallResult:
    """Call a method; whatever it raises is a result, too."""
    try:
        return CallResult(method(*arguments))
    except (Exception, SystemExit) as error:
        return CallResult(error=error)


@dataclass
class Play:
    """An episode, turn by turn."""

    environment: Environment
    script: Script
    beginning: CallResult = field(init=False)
    steps: list[CallResult] = field(default_factory=list)
    score: CallResult | None = None
    modified: str = ""
    """What the environment changed though it is not its own."""
    answer: str = ""
    """The text of the last turn."""
    turn: int = 0
    """The number of turns so far."""

    def __post_init__(self) -> None:
        self._row = copy.deepcopy(dict(self.script.row))
        self.answer = str(self._row.get("answer", ""))
        beginning = attempt(self.environment.reset, self._row, self.script.seed)
        self.beginning = CallResult(copy.deepcopy(beginning.value), beginning.error)
        self._over = self.beginning.error is not None

    def advance(self) -> bool:
        """Play a turn. Returns False if the episode is over."""
        if self._over or self.turn == len(self.script.turns):
            return False
        turn = self.script.turns[self.turn]
        self.turn += 1
        if isinstance(turn, str):
            self._say(turn)
        else:
            for tool, arguments in turn.items():
                self._call(tool, arguments)
        return True

    def end(self) -> Play:
        """Play the remaining turns, score the episode, and close it."""
        while self.advance():
            pass
        if self.beginning.error is None and has_score(type(self.environment)):
            self.score = attempt(self.environment.score, self.answer)
        if self._row != self.script.row:
            self.modified = "the row"
        attempt(self.environment.close)
        return self

    @property
    def results(self) -> list[CallResult]:
        """Of all its calls."""
        return [self.beginning, *self.steps, *([] if self.score is None else [self.score])]

    @property
    def rewards(self) -> list[tuple[str, Any]]:
        """(the method, its reward) for each of the episode."""
        observations = [step.value for step in self.steps if isinstance(step.value, Observation)]
        rewards = [("step()", each.reward) for each in observations]
        if self.score is not None and self.score.error is None:
            rewards.append(("score()", self.score.value))
        return rewards

    @property
    def reward(self) -> float:
        """That of the episode, without what is no finite number."""
        numbers = [value for _, value in self.rewards if isinstance(value, bool | int | float)]
        return math.fsum(filter(math.isfinite, numbers))

    @property
    def trace(self) -> Trace:
        """What it led to, in a form that JSON can express."""
        turns = [[f"turn {number}", str(step)] for number, step in enumerate(self.steps, 1)]
        ends = [] if self.score is None else [["score()", str(self.score)]]
        return [["reset()", str(self.beginning)], *turns, *ends]

    def change_in(self, trace: Trace) -> str:
        """Where the turns of another trace differ first, in words; empty if they do not."""
        return difference(self.trace[1:], trace[1:])

    def _say(self, text: str) -> None:
        self.answer = text
        if not is_game(type(self.environment)):
            self._over = True
            return
        step = attempt(self.environment.step, text)
        self.steps.append(step)
        self._over = bool(getattr(step.value, "done", True))

    def _call(self, tool: str, arguments: Mapping[str, Any]) -> None:
        passed = copy.deepcopy(dict(arguments))
        self.steps.append(attempt(call_tool, self.environment, tool, passed))
        if passed != arguments:
            self.modified = f"the arguments of {tool}"


def difference(first: Sequence[Sequence[str]], second: Sequence[Sequence[str]]) -> str:
    """Where two traces differ first, in words; empty if they do not."""
    for (label, result), (again, changed) in zip_longest(first, second, fillvalue=("", "nothing")):
        if result != changed:
            return f"{label or again} gives {result:.{LONGEST_SHOWN}}, then {changed:.60}"
    return ""
