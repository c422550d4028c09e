"""One episode: a conversation of a policy with an environment, token by token."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlcli.api.config import stable_seed
from rlcli.api.environment import (
    Environment,
    ToolMistake,
    call_tool,
    has_score,
    is_game,
    tools_of,
)
from rlcli.api.generation import Spans
from rlcli.api.model import FinishedResponse
from rlcli.api.special_tokens import as_content, tokens_of
from rlcli.errors import ProjectError

from ._responses import Written
from ._tool_calls import WrittenCall, tool_calls

MOST_CALLS = 16
"""Tool calls of one turn that are made."""


@dataclass(frozen=True)
class SampledTurn:
    """What the policy sampled in one turn."""

    start: int
    """Its first token in the episode."""
    response: FinishedResponse
    spans: Spans | None
    """The versions of the weights that sampled it, where they change meanwhile."""
    reward: float


@dataclass(frozen=True)
class Outcome:
    """What the text of a turn has led to."""

    observed: str = ""
    reward: float = 0.0
    stop: str | None = None
    """Why the episode is over; None: it may go on."""
    calls: int = 0
    """Calls of tools, including those that failed."""
    mistakes: int = 0
    """Those that failed, and texts that could not be read as calls."""


@dataclass
class Episode:
    """An episode in progress. `ids` are the tokens so far: those of the prompt, those that were
    sampled, exactly as they were, and those of observations."""

    environment: Environment
    tokenizer: Any
    prompt: torch.Tensor
    """[P] int64."""
    seed: int
    """Of what is sampled."""
    max_observation: int
    """Longest observation, in characters."""
    is_scored: bool
    """Whether the environment's reward at the end counts."""
    ids: list[int] = field(default_factory=list)
    turns: list[SampledTurn] = field(default_factory=list)
    calls: int = 0
    mistakes: int = 0
    stop: str = ""
    """Why it is over: finished, turns, tokens or time."""
    reward: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def begin(self, row: Mapping[str, Any], seed: int) -> None:
        """Reset the environment for a row. The prompt remains that of the row, unless the
        environment returns another."""
        text = self.environment.reset(row, seed)
        if text is not None:
            if not isinstance(text, str):
                raise _fault(self.environment, f"reset() returned {type(text).__name__}, no text")
            self.prompt = torch.tensor(self.tokenizer.encode(text), dtype=torch.int64)
        self.ids = self.prompt.tolist()

    @property
    def text(self) -> torch.Tensor:
        """[n] int64: the tokens so far; before the first turn, the prompt object itself."""
        return torch.tensor(self.ids, dtype=torch.int64) if self.turns else self.prompt

    @property
    def turn_seed(self) -> int:
        """The seed of the next turn; that of the first one is the episode's."""
        return stable_seed(self.seed, len(self.turns)) if self.turns else self.seed

    @property
    def written(self) -> int:
        """Tokens after the prompt."""
        return len(self.ids) - len(self.prompt)

    def take(self, response: FinishedResponse, spans: Spans | None) -> Outcome:
        """A turn has been sampled: act on its text."""
        start = len(self.ids)
        self.ids += response.tokens.tolist()
        text = self.tokenizer.decode(response.tokens, skip_special_tokens=True)
        outcome = self._act(text, response.ended)
        self.turns.append(SampledTurn(start, response, spans, outcome.reward))
        self.calls += outcome.calls
        self.mistakes += outcome.mistakes
        return outcome

    def observe(self, text: str) -> list[int]:
        """The ids of an observation. Names of special tokens in it are plain text."""
        return tokens_of(self.tokenizer, [as_content(self.tokenizer, text)])[0]

    def end(self, stop: str) -> None:
        """The episode is over: score it."""
        self.stop = stop
        rewards = [turn.reward for turn in self.turns]
        if self.is_scored and has_score(type(self.environment)):
            answer = self.tokenizer.decode(self.turns[-1].response.tokens, skip_special_tokens=True)
            rewards.append(_number(self.environment, "score()", self.environment.score(answer)))
        self.reward = _within(self.environment, math.fsum(rewards))

    def numbers(self) -> dict[str, float]:
        """Its numbers for metrics."""
        return {
            "turns": len(self.turns),
            "tool_calls": self.calls,
            "tool_mistakes": self.mistakes,
            f"out_of_{self.stop}": 1,
        }

    def sequence(self) -> Written:
        """Its tokens, and which of them were sampled."""
        sampled = torch.zeros(len(self.ids), dtype=torch.bool)
        logprobs = torch.zeros(len(self.ids) - 1)
        for turn in self.turns:
            end = turn.start + len(turn.response.tokens)
            sampled[turn.start : end] = True
            logprobs[turn.start - 1 : end - 1] = turn.response.logprobs
        return Written(torch.tensor(self.ids, dtype=torch.int64), sampled, logprobs)

    def spans(self) -> Spans | None:
        """The versions that sampled it, turn after turn."""
        spans = [turn.spans for turn in self.turns]
        return None if None in spans else [span for of_turn in spans for span in of_turn or ()]

    def turn_rewards(self) -> torch.Tensor:
        """[L] float32: the reward of each turn at its last token; that of `score` at the last of
        all."""
        rewards = torch.zeros(len(self.ids))
        for turn in self.turns:
            rewards[turn.start + len(turn.response.tokens) - 1] = turn.reward
        rewards[-1] += self.reward - math.fsum(turn.reward for turn in self.turns)
        return rewards

    def _act(self, text: str, ended: bool) -> Outcome:
        """`ended`: whether the turn was not cut off."""
        if is_game(type(self.environment)):
            return self._step(text)
        calls, problem = tool_calls(text)
        if not calls and problem is None:
            return Outcome(stop="finished" if ended else "tokens")
        results = [self._called(call) for call in calls[:MOST_CALLS]]
        if len(calls) > MOST_CALLS:
            problem = f"only the first {MOST_CALLS} calls of a turn are made"
        if problem is not None:
            results.append((f"error: {problem}", True))
        observed = "".join(f"{self._cut(result)}\n" for result, _ in results)
        mistakes = sum(failed for _, failed in results)
        return Outcome(observed, calls=len(results), mistakes=mistakes)

    def _step(self, text: str) -> Outcome:
        observation = self.environment.step(text)
        reward = _number(self.environment, "step()", observation.reward)
        stop = "finished" if observation.done else None
        return Outcome(self._cut(str(observation.text)), reward, stop)

    def _called(self, call: WrittenCall) -> tuple[str, bool]:
        """What a tool returns, or why it failed; and whether it did."""
        try:
            return call_tool(self.environment, call.name, call.arguments), False
        except ToolMistake as mistake:
            return f"error: {mistake}", True

    def _cut(self, text: str) -> str:
        return text if len(text) <= self.max_observation else f"{text[: self.max_observation]}…"


def check_environment(environment: type[Environment]) -> None:
    """Raise ProjectError for an environment with which nothing can be done."""
    if not tools_of(environment) and not is_game(environment) and not has_score(environment):
        raise ProjectError(
            f"{environment.__name__} has neither tools nor step() nor score()",
            hint="a public method is a tool: give it type hints and a docstring",
        )


def _number(environment: Environment, source: str, value: Any) -> float:
    """A reward. Raises ProjectError if it is not a finite number."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise _fault(environment, f"{source} gave the reward {value!r}, which is not a finite number")


def _within(environment: Environment, reward: float) -> float:
    """The reward of an episode. Raises ProjectError if it is outside the declared range."""
    lowest, highest = environment.REWARDS or (-math.inf, math.inf)
    if lowest <= reward <= highest:
        return reward
    raise _fault(environment, f"the reward is {reward:g}, but REWARDS is ({lowest:g}, {highest:g})")


def _fault(environment: Environment, fault: str) -> ProjectError:
    return ProjectError(f"the environment {type(environment).__name__}: {fault}")
