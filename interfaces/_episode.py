"""One episode: a conversation of a policy with an environment, token by token."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from rlcli.api.chat_template import name_of, template_of
from rlcli.api.config import stable_seed
from rlcli.api.environment import (
    Environment,
    EnvironmentFailure,
    has_score,
    is_game,
    schemas_of,
    states_tools,
)
from rlcli.api.generation import Spans
from rlcli.api.key_meaning import MESSAGES
from rlcli.api.model import FinishedResponse
from rlcli.api.tool_formats import Parsed, call_id
from rlcli.api.turns import Conversation, Message, TokenRow
from rlcli.errors import ProjectError, UsageError, WorkerError

from ._environment_calls import Reply
from ._episode_rules import Beginning, EnvironmentCall, Move, Moves, PolicyTurn, Rules, SampledTurn
from ._plain_turns import PlainTurns
from ._responses import Written

TRIES = 2
"""How many times an episode is played whose environment fails."""


class LimitReached(Exception):
    """The environment had to be ended by a limit that the policy may have caused."""


@dataclass(eq=False)
class Episode:
    """An episode. It says what comes next, a turn or a call of its environment, and is given the
    answer."""

    rules: Rules
    beginning: Beginning
    seed: int
    """Of what is sampled."""
    conversation: Conversation | PlainTurns = field(init=False)
    prompt: torch.Tensor = field(init=False)
    """[P] int64: the tokens before the first turn."""
    turns: list[SampledTurn] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Of the turns so far."""
    calls: int = 0
    mistakes: int = 0
    timeouts: int = 0
    stop: str = ""
    """Why it is over: "finished", or the metric that counts it."""
    reward: float = 0.0
    failures: list[str] = field(default_factory=list)
    """Why its environments failed."""
    asked: list[tuple[Mapping[str, Any], Reply]] = field(default_factory=list)
    """What its environment was asked, and what it replied."""

    def __post_init__(self) -> None:
        self._start(self._unplayed())
        self._moves = self._play()

    def advance(self, answer: Any = None) -> Move | None:
        """What comes next, after the answer to what came last: a reply, or a response with its
        spans. None: the episode is over."""
        try:
            return self._moves.send(answer)
        except StopIteration:
            return None

    @property
    def is_discarded(self) -> bool:
        return self.stop == "discarded"

    @property
    def ids(self) -> list[int]:
        """The tokens that the policy continues: those of the prompt, those that were sampled,
        exactly as they were, and those of observations; or, where the template has rewritten
        earlier turns, what it writes instead."""
        return self.conversation.ids

    @property
    def rows(self) -> list[TokenRow]:
        """The texts that the policy has continued, each to its last sampled token."""
        return self.conversation.rows

    # -- its course --------------------------------------------------------------------------------

    def _play(self) -> Moves:
        """Play it, once more if the environment fails, and leave it out if it fails again. Nothing
        is sampled again if the environment can be asked the same again: see `_repeat`."""
        while not self.stop and len(self.failures) < TRIES:
            try:
                self.stop = yield from self._attempt()
            except EnvironmentFailure as failure:
                self.failures.append(str(failure))
                self._require_alone(str(failure))
            yield EnvironmentCall({"call": "close"})
        if not self.stop:
            self.stop = "discarded"
            self._start(self._unplayed())

    def _attempt(self) -> Generator[Move, Any, str]:
        """Returns why it is over."""
        began = time.monotonic()
        self.asked = []
        row, seed = self.beginning.row, self.beginning.seed
        try:
            begins = yield from self._ask("reset", row=row, seed=seed)
        except LimitReached as limit:  # nothing of it is the policy's
            raise EnvironmentFailure(str(limit)) from limit
        self._start(self._opened(begins))
        stop = None
        try:
            while stop is None:
                stop = yield from self._take_turn(began)
            self._cut_observation()
            yield from self._score()
        except LimitReached as limit:
            self._require_alone(str(limit))
            self._cut_observation()
            self._sum_up(self.rules.limit_reward if self._asks_score else 0.0)
            return "limited"
        return stop

    def _take_turn(self, began: float) -> Generator[Move, Any, str | None]:
        """One turn, and what it leads to. Returns why no other turn follows, if none does."""
        text = torch.tensor(self.ids, dtype=torch.int64) if self.turns else self.prompt
        seed = stable_seed(self.seed, len(self.turns)) if self.turns else self.seed
        response, spans = yield PolicyTurn(text, seed)
        in_reasoning = self.conversation.in_reasoning
        words = self.conversation.append_sampled(response.tokens.tolist())
        self.turns.append(SampledTurn(response, spans))
        self.rewards.append(0.0)
        parsed = stop = None
        if self._has_tools:
            parsed = self.rules.tool_format.parse(words, in_reasoning=in_reasoning)
        if parsed is not None and (parsed.has_calls or not is_game(self.rules.environment)):
            observed = yield from self._call_tools(parsed)
        else:
            observed, stop = yield from self._step(response)
        if not observed:
            return "finished" if response.ended else "out_of_tokens"
        return stop or self._observe(observed, parsed, began)

    def _call_tools(self, parsed: Parsed) -> Generator[Move, Any, list[dict[str, Any]]]:
        """Make the calls of a turn; returns what the policy reads next."""
        results: Sequence[tuple[str, bool, bool]] = ()
        if parsed.calls:
            calls = [(call.name, call.arguments) for call in parsed.calls]
            results = yield from self._ask("tools", calls=calls)
        self.calls += len(results) + len(parsed.problems)
        self.mistakes += sum(failed for _, failed, _ in results) + len(parsed.problems)
        self._count_timeouts(sum(over for _, _, over in results))
        return _as_messages(parsed, [text for text, _, _ in results])

    def _step(
        self, response: FinishedResponse
    ) -> Generator[Move, Any, tuple[list[dict[str, Any]], str | None]]:
        """Of a game: what the policy reads next, and why no turn follows."""
        text, self.rewards[-1], done = yield from self._ask("step", action=self._words(response))
        return [{"role": "user", "content": text}], "finished" if done else None

    def _observe(
        self, observed: Sequence[Message], parsed: Parsed | None, began: float
    ) -> str | None:
        """Append what the policy reads next. Returns why no turn follows, if none does."""
        rules = self.rules
        if len(self.turns) >= rules.max_turns:
            return "out_of_turns"
        if rules.max_seconds is not None and time.monotonic() - began > rules.max_seconds:
            return "out_of_time"
        turn = parsed.message if parsed is not None else None
        self.conversation.append_messages(observed, turn)
        written = sum(len(row.ids) for row in self.rows) - len(self.prompt)
        return "out_of_tokens" if written + rules.turn_tokens > rules.max_tokens else None

    def _score(self) -> Generator[Move, Any, None]:
        score = 0.0
        if self._asks_score:
            answer = self._words(self.turns[-1].response)
            score = yield from self._ask("score", answer=answer)
        self._sum_up(score)

    def _ask(self, call: str, **arguments: Any) -> Generator[Move, Any, Any]:
        """What the environment returns. Raises LimitReached, EnvironmentFailure, or ProjectError if
        its code is at fault."""
        request = {"call": call, **arguments}
        reply: Reply = yield EnvironmentCall(request)
        if "failure" in reply and self.rules.environment.REPRODUCIBLE and not self.failures:
            self.failures.append(reply["failure"])
            self._require_alone(reply["failure"])
            reply = yield from self._repeat(request)
        if "failure" in reply:
            raise EnvironmentFailure(reply["failure"])
        if "limit" in reply:
            raise LimitReached(reply["limit"])
        if "fault" in reply:
            raise self._fault(reply["fault"], reply["where"])
        self.asked.append((request, reply))
        return reply["value"]

    def _repeat(self, request: Mapping[str, Any]) -> Generator[Move, Any, Reply]:
        """Ask a new environment all that the failed one was asked, and at last a request. Returns
        the reply to that, or why the new one failed too."""
        yield EnvironmentCall({"call": "close"})
        for earlier, expected in self.asked:
            reply: Reply = yield EnvironmentCall(earlier)
            if "failure" in reply or "limit" in reply:
                return {"failure": reply.get("failure") or reply["limit"]}
            if reply != expected:
                raise self._fault(
                    f"it is REPRODUCIBLE, but {earlier['call']}() returned something else when it "
                    "was repeated"
                )
        return (yield EnvironmentCall(request))

    # -- its state ---------------------------------------------------------------------------------

    def _start(self, conversation: Conversation | PlainTurns) -> None:
        """The state before the first turn."""
        ids = tuple(conversation.ids)
        new = torch.tensor(ids, dtype=torch.int64)
        self.conversation = conversation
        self.prompt = self.rules.prompts.setdefault(ids, new)
        self.turns, self.rewards, self.reward = [], [], 0.0
        self.calls = self.mistakes = self.timeouts = 0

    def _unplayed(self) -> PlainTurns:
        return PlainTurns(self.rules.tokenizer, self.beginning.prompt)

    def _opened(self, begins: Any) -> Conversation | PlainTurns:
        """The conversation before the first turn. It begins with the row's prompt, unless the
        environment's reset returned another: `begins`, a text or messages."""
        rules = self.rules
        if template_of(rules.tokenizer) is None:
            if isinstance(begins, list):
                name = name_of(rules.tokenizer)
                raise self._fault(f"reset() returned messages, but {name} has no chat template")
            if begins is None:
                return self._unplayed()
            return PlainTurns(rules.tokenizer, rules.tokenizer.encode(begins))
        messages = self.beginning.row.get(MESSAGES) or []
        if isinstance(begins, str) and begins:  # instead of the last: the system prompt remains
            messages = [*messages[:-1], {"role": "user", "content": begins}]
        elif begins:
            messages = begins
        if not messages:
            raise UsageError(
                "the rows have no messages, which the chat template of "
                f"{name_of(rules.tokenizer)} could write with the tools",
                hint="use a dataset that has them in its metadata, as prompt_only with chat: auto, "
                "or return messages from reset()",
            )
        tools = rules.tool_format.tools or None
        return Conversation(rules.tokenizer, messages, tools, rules.on_rewrite)

    def _cut_observation(self) -> None:
        """It ends with its last sampled token."""
        if not self.rows[-1].turns:  # the template rewrote what no turn has followed
            self.rows.pop()
        _, end = self.rows[-1].turns[-1]
        del self.ids[end:]

    @property
    def _has_tools(self) -> bool:
        """Whether turns may call tools; in a game, turns that call none are steps."""
        return bool(self.rules.tool_format.tools) or not is_game(self.rules.environment)

    @property
    def _asks_score(self) -> bool:
        return self.rules.is_scored and has_score(self.rules.environment)

    def _sum_up(self, score: float) -> None:
        """The reward of its turns and at the end. Raises ProjectError if it is outside of the
        declared range."""
        self.reward = math.fsum([*self.rewards, score])
        lowest, highest = self.rules.environment.REWARDS or (-math.inf, math.inf)
        if not lowest <= self.reward <= highest:
            fault = f"the reward is {self.reward:g}, but REWARDS is ({lowest:g}, {highest:g})"
            raise self._fault(fault)

    def _count_timeouts(self, number: int) -> None:
        self.timeouts += number
        if number:
            self._require_alone("a tool took too long")

    def _require_alone(self, event: str) -> None:
        """Raise WorkerError for an event that other ranks, which play the same, may not have."""
        if self.rules.is_shared:
            message = f"{self._origin}: {event}; ranks that share a model must all play the same"
            raise WorkerError(message, code="F52")

    @property
    def _origin(self) -> str:
        return f"the environment {self.rules.name}, {self.beginning.label}"

    def _fault(self, fault: str, where: str | None = None) -> ProjectError:
        return ProjectError(f"{self._origin}: {fault}", where=where, code="F54")

    def _words(self, response: FinishedResponse) -> str:
        return str(self.rules.tokenizer.decode(response.tokens, skip_special_tokens=True))

    # -- what it has come to -----------------------------------------------------------------------

    def numbers(self) -> dict[str, float]:
        """Its numbers for metrics."""
        return {
            "turns": len(self.turns),
            "tool_calls": self.calls,
            "tool_mistakes": self.mistakes,
            "tool_timeouts": self.timeouts,
            "forks": len(self.rows) - 1,
            "replayed": bool(self.failures),
            self.stop: 1,
        }

    def sequence(self) -> Written:
        """Its tokens, row after row, and which of them were sampled."""
        ids = [id_ for row in self.rows for id_ in row.ids]
        sampled = torch.zeros(len(ids), dtype=torch.bool)
        logprobs = torch.zeros(len(ids) - 1)
        for (start, end), turn in self._spoken():
            sampled[start:end] = True
            logprobs[start - 1 : end - 1] = turn.response.logprobs
        return Written(torch.tensor(ids, dtype=torch.int64), sampled, logprobs)

    def forks(self) -> torch.Tensor:
        """[L] bool: the tokens with which a row begins after another one."""
        lengths = [len(row.ids) for row in self.rows]
        forks = torch.zeros(sum(lengths), dtype=torch.bool)
        forks[list(accumulate(lengths[:-1]))] = True
        return forks

    def spans(self) -> Spans | None:
        """The versions that sampled it, turn after turn."""
        spans = [turn.spans for turn in self.turns]
        return None if None in spans else [span for of_turn in spans for span in of_turn or ()]

    def turn_rewards(self) -> torch.Tensor:
        """[L] float32: the reward of each turn at its last token; that of the last turn includes
        the one at the end."""
        rewards = torch.zeros(sum(len(row.ids) for row in self.rows))
        for ((_, end), _), reward in zip(self._spoken(), self.rewards, strict=True):
            rewards[end - 1] = reward
        rewards[-1] += self.reward - math.fsum(self.rewards)
        return rewards

    def _spoken(self) -> Iterable[tuple[tuple[int, int], SampledTurn]]:
        """Each turn with its [start, end) in the tokens of all rows."""
        begins = accumulate((len(row.ids) for row in self.rows), initial=0)
        spans = [
            (begin + start, begin + end)
            for begin, row in zip(begins, self.rows, strict=False)
            for start, end in row.turns
        ]
        return zip(spans, self.turns, strict=True)


def _as_messages(parsed: Parsed, results: Sequence[str]) -> list[dict[str, Any]]:
    """What the policy reads after a turn with calls, which have these results: messages of the
    tools, and what is wrong with the turn in the last one or, without any, in one of the user."""
    observed = [
        {"role": "tool", "name": call.name, "tool_call_id": call_id(number), "content": text}
        for number, (call, text) in enumerate(zip(parsed.calls, results, strict=True))
    ]
    problems = "\n".join(f"error: {problem}" for problem in parsed.problems)
    if problems and not observed:
        return [{"role": "user", "content": f"{problems}\n"}]
    if problems:
        observed[-1]["content"] += f"\n{problems}"
    return observed


def check_environment(environment: type[Environment]) -> None:
    """Raise ProjectError for an environment with which nothing can be done."""
    has_tools = states_tools(environment) or bool(schemas_of(environment))
    if not (has_tools or is_game(environment) or has_score(environment)):
        raise ProjectError(
            f"{environment.__name__} has neither tools nor step() nor score()",
            hint="a public method is a tool: give it type hints and a docstring",
        )
