"""One episode: a conversation of a policy with an environment, token by token."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlcli.api.chat_template import name_of, template_of
from rlcli.api.config import stable_seed
from rlcli.api.environment import (
    Environment,
    ToolMistake,
    call_tool,
    has_score,
    is_game,
    schemas_of,
)
from rlcli.api.generation import Spans
from rlcli.api.key_meaning import MESSAGES
from rlcli.api.model import FinishedResponse
from rlcli.api.tool_formats import ToolCall, ToolFormat, call_id
from rlcli.api.turns import Conversation, Message, OnRewrite
from rlcli.errors import ProjectError, UsageError

from ._plain_turns import PlainTurns
from ._responses import Written


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the episodes of a call share."""

    tokenizer: Any
    tool_format: ToolFormat
    """How the policy writes tool calls, with the schemas of the tools."""
    on_rewrite: OnRewrite
    max_turns: int
    max_tokens: int
    """Tokens after the prompt."""
    turn_tokens: int
    """Tokens of a turn."""
    max_seconds: float | None
    max_observation: int
    """Longest observation, in characters."""
    is_scored: bool
    """Whether the environment's reward at the end counts."""


@dataclass(frozen=True)
class SampledTurn:
    """What the policy sampled in one turn."""

    response: FinishedResponse
    spans: Spans | None
    """The versions of the weights that sampled it, where they change meanwhile."""
    reward: float


@dataclass(frozen=True)
class Outcome:
    """What the text of a turn has led to."""

    observed: Sequence[Message] = ()
    """What the policy reads next."""
    turn: Message | None = None
    """The turn as chat templates expect it, with its calls."""
    reward: float = 0.0
    stop: str | None = None
    """Why the episode is over; None: it may go on."""
    calls: int = 0
    """Calls of tools, including those that failed."""
    mistakes: int = 0
    """Those that failed, and texts that could not be read as calls."""


@dataclass
class Episode:
    """An episode in progress."""

    environment: Environment
    rules: Rules
    conversation: Conversation | PlainTurns
    prompt: torch.Tensor
    """[P] int64: the tokens before the first turn."""
    seed: int
    """Of what is sampled."""
    turns: list[SampledTurn] = field(default_factory=list)
    calls: int = 0
    mistakes: int = 0
    stop: str = ""
    """Why it is over: "finished", or the metric that counts it."""
    reward: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def ids(self) -> list[int]:
        """The tokens so far: those of the prompt, those that were sampled, exactly as they were,
        and those of observations. Where the template rewrites earlier turns, the episode ends."""
        return self.conversation.rows[0].ids

    @property
    def text(self) -> torch.Tensor:
        """[n] int64: the tokens so far; before the first turn, the prompt object itself."""
        return torch.tensor(self.ids, dtype=torch.int64) if self.turns else self.prompt

    @property
    def turn_seed(self) -> int:
        """The seed of the next turn; that of the first one is the episode's."""
        return stable_seed(self.seed, len(self.turns)) if self.turns else self.seed

    def take(self, response: FinishedResponse, spans: Spans | None) -> Outcome:
        """A turn has been sampled: act on its text."""
        text = self.conversation.append_sampled(response.tokens.tolist())
        if is_game(type(self.environment)):
            outcome = self._step(self._words(response))
        else:
            outcome = self._call_tools(text, response.ended)
        self.turns.append(SampledTurn(response, spans, outcome.reward))
        self.calls += outcome.calls
        self.mistakes += outcome.mistakes
        return outcome

    def observe(self, outcome: Outcome) -> str | None:
        """Append what the policy reads next. Returns why no turn follows, if none does."""
        rules = self.rules
        if outcome.stop is not None:
            return outcome.stop
        if len(self.turns) >= rules.max_turns:
            return "out_of_turns"
        if rules.max_seconds is not None and time.monotonic() - self.began > rules.max_seconds:
            return "out_of_time"
        if self.conversation.append_messages(outcome.observed, outcome.turn).forked:
            return "rewritten"
        written = len(self.ids) - len(self.prompt)
        return "out_of_tokens" if written + rules.turn_tokens > rules.max_tokens else None

    def end(self, stop: str) -> None:
        """The episode is over: score it. It ends with its last sampled token."""
        self.stop = stop
        _, end = self.conversation.rows[0].turns[-1]
        del self.ids[end:]
        rewards = [turn.reward for turn in self.turns]
        if self.rules.is_scored and has_score(type(self.environment)):
            answer = self._words(self.turns[-1].response)
            rewards.append(_number(self.environment, "score()", self.environment.score(answer)))
        self.reward = _within(self.environment, math.fsum(rewards))

    def numbers(self) -> dict[str, float]:
        """Its numbers for metrics."""
        return {
            "turns": len(self.turns),
            "tool_calls": self.calls,
            "tool_mistakes": self.mistakes,
            self.stop: 1,
        }

    def sequence(self) -> Written:
        """Its tokens, and which of them were sampled."""
        sampled = torch.zeros(len(self.ids), dtype=torch.bool)
        logprobs = torch.zeros(len(self.ids) - 1)
        for (start, end), turn in self._spoken():
            sampled[start:end] = True
            logprobs[start - 1 : end - 1] = turn.response.logprobs
        return Written(torch.tensor(self.ids, dtype=torch.int64), sampled, logprobs)

    def spans(self) -> Spans | None:
        """The versions that sampled it, turn after turn."""
        spans = [turn.spans for turn in self.turns]
        return None if None in spans else [span for of_turn in spans for span in of_turn or ()]

    def turn_rewards(self) -> torch.Tensor:
        """[L] float32: the reward of each turn at its last token; that of `score` at the last of
        all."""
        rewards = torch.zeros(len(self.ids))
        for (_, end), turn in self._spoken():
            rewards[end - 1] = turn.reward
        rewards[-1] += self.reward - math.fsum(turn.reward for turn in self.turns)
        return rewards

    def _spoken(self) -> Iterable[tuple[tuple[int, int], SampledTurn]]:
        """Each turn with its [start, end) in the tokens."""
        return zip(self.conversation.rows[0].turns, self.turns, strict=True)

    def _words(self, response: FinishedResponse) -> str:
        return str(self.rules.tokenizer.decode(response.tokens, skip_special_tokens=True))

    def _call_tools(self, text: str, ended: bool) -> Outcome:
        """Make the calls in a turn. `ended`: whether it was not cut off."""
        parsed = self.rules.tool_format.parse(text)
        if not parsed.calls and not parsed.problems:
            return Outcome(stop="finished" if ended else "out_of_tokens")
        results = [self._result(call) for call in parsed.calls]
        observed = [
            {"role": "tool", "name": call.name, "tool_call_id": call_id(number), "content": result}
            for number, (call, (result, _)) in enumerate(zip(parsed.calls, results, strict=True))
        ]
        problems = "\n".join(f"error: {problem}" for problem in parsed.problems)
        if not observed:
            observed = [{"role": "user", "content": f"{problems}\n"}]
        elif problems:
            observed[-1]["content"] += f"\n{problems}"
        return Outcome(
            observed,
            parsed.message,
            calls=len(results) + len(parsed.problems),
            mistakes=sum(failed for _, failed in results) + len(parsed.problems),
        )

    def _step(self, text: str) -> Outcome:
        observation = self.environment.step(text)
        reward = _number(self.environment, "step()", observation.reward)
        stop = "finished" if observation.done else None
        message = {"role": "user", "content": self._cut(str(observation.text))}
        return Outcome([message], reward=reward, stop=stop)

    def _result(self, call: ToolCall) -> tuple[str, bool]:
        """What a tool returns, or why it failed; and whether it did."""
        try:
            return self._cut(call_tool(self.environment, call.name, call.arguments)), False
        except ToolMistake as mistake:
            return self._cut(f"error: {mistake}"), True

    def _cut(self, text: str) -> str:
        longest = self.rules.max_observation
        return text if len(text) <= longest else f"{text[:longest]}…"


def opened(
    environment: Environment, rules: Rules, row: Mapping[str, Any], prompt: Sequence[int], seed: int
) -> Conversation | PlainTurns:
    """Reset the environment for a row: the conversation before the first turn. It begins with the
    row's prompt, whose tokens are `prompt`, unless the environment returns another."""
    beginning: Any = environment.reset(row, seed)
    if not (isinstance(beginning, str | None) or _are_messages(beginning)):
        kind = type(beginning).__name__
        raise _fault(environment, f"reset() returned a {kind}, neither a text nor messages")
    if template_of(rules.tokenizer) is None:
        return _without_template(environment, rules, prompt, beginning)
    messages: Any = beginning or row.get(MESSAGES)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not messages:
        raise UsageError(
            "the rows have no messages, which the chat template of "
            f"{name_of(rules.tokenizer)} could write with the tools",
            hint="use a dataset of prompts with chat: auto, or return messages from reset()",
        )
    tools = rules.tool_format.tools or None
    return Conversation(rules.tokenizer, messages, tools, rules.on_rewrite)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value
    )


def _without_template(
    environment: Environment, rules: Rules, prompt: Sequence[int], beginning: Any
) -> PlainTurns:
    """The same for a tokenizer without a chat template."""
    if isinstance(beginning, list):
        fault = f"reset() returned messages, but {name_of(rules.tokenizer)} has no chat template"
        raise _fault(environment, fault)
    return PlainTurns(
        rules.tokenizer, prompt if beginning is None else rules.tokenizer.encode(beginning)
    )


def check_environment(environment: type[Environment]) -> None:
    """Raise ProjectError for an environment with which nothing can be done."""
    if not schemas_of(environment) and not is_game(environment) and not has_score(environment):
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
