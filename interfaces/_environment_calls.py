"""What an episode asks of its environment, answered where the environment lives. Requests and
replies are JSON. No torch: an environment's process does without.

A reply has one of four fields:

    value     what the call returned
    limit     which limit it exceeded; the policy may have caused that
    failure   why it failed; the policy cannot have caused that
    fault     what is wrong with the environment's code, and `where`
"""

from __future__ import annotations

import json
import math
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlcli.api.environment import (
    Environment,
    EnvironmentFailure,
    Observation,
    ToolMistake,
    call_tool,
    described,
    named_variables,
    tools_in,
)
from rlcli.api.tool_schema import Schema

Request = Mapping[str, Any]
"""`call`: tool_schemas, reset, tools, step, score or close; and its arguments."""
Reply = dict[str, Any]

Result = tuple[str, bool, bool]
"""What a tool returned, or why it failed; whether it did; whether it took too long."""

BEGINNINGS = ("tool_schemas", "reset")
"""Calls with which an environment begins."""

LONGEST_REPLY = 1 << 24
"""Bytes of a reply, as a line of JSON."""
REDACTED = "<redacted>"
SHORTEST_SECRET = 8
"""Characters: shorter ones appear in ordinary texts."""
LONGEST_REASON = 500
"""Characters of a text that says what went wrong."""


class OverTime(BaseException):
    """A call takes too long. It is raised within the call, and not an Exception, so that an
    environment does not take it for one of its own."""


class Fault(Exception):
    """An environment does not keep the contract."""


class AnsweringEnvironment:
    """An environment, which its first call makes."""

    def __init__(
        self, make: Callable[[], Environment], longest: int, call_seconds: float | None = None
    ):
        """`longest`: characters of an observation. `call_seconds`: of a call, each tool counting as
        one; only in a main thread, whose alarm is used."""
        self._make = make
        self._longest = longest
        self._seconds = call_seconds
        self._made: Environment | None = None

    def answer(self, request: Request) -> Reply:
        call = request["call"]
        try:
            with time_limit(None if call == "tools" else self._seconds):
                return {"value": getattr(self, f"_{call}")(**request)}
        except EnvironmentFailure as error:
            return {"failure": _short(described(error))}
        except OverTime:
            return {"limit": f"{call}() took longer than {self._seconds:g} s"}
        except MemoryError:
            return {"limit": f"{call}() used up its memory"}
        except Fault as error:
            return {"fault": _short(str(error)), "where": None}
        except BaseException as error:
            fault = _short(f"{call}() raised {described(error)}")
            return {"fault": fault, "where": _where(error)}

    @property
    def _environment(self) -> Environment:
        self._made = self._made or self._make()
        return self._made

    def _reset(self, row: Mapping[str, Any], seed: int, **_: Any) -> Any:
        beginning: Any = self._environment.reset(row, seed)
        if isinstance(beginning, str):
            return readable(beginning)
        if beginning is None:
            return None
        if not _are_messages(beginning):
            kind = type(beginning).__name__
            raise Fault(f"reset() returned a {kind}, neither a text nor messages")
        try:
            return json.loads(readable(json.dumps(beginning, ensure_ascii=False)))
        except (TypeError, ValueError) as error:
            raise Fault(f"reset() returned messages that are not JSON: {error}") from error

    def _tool_schemas(self, **_: Any) -> list[Schema]:
        try:
            return list(tools_in(self._environment).values())
        except ValueError as error:
            raise Fault(f"tool_schemas(): {error}") from error

    def _tools(self, calls: list[tuple[str, dict[str, Any]]], **_: Any) -> list[Result]:
        return [self._tool(name, arguments) for name, arguments in calls]

    def _tool(self, name: str, arguments: Mapping[str, Any]) -> Result:
        try:
            with time_limit(self._seconds):
                return self._cut(call_tool(self._environment, name, arguments)), False, False
        except ToolMistake as mistake:
            return self._cut(f"error: {mistake}"), True, False
        except OverTime:
            return self._cut(f"error: {name} took longer than {self._seconds:g} s"), True, True

    def _step(self, action: str, **_: Any) -> tuple[str, float, bool]:
        observation = self._environment.step(action)
        if not isinstance(observation, Observation):
            raise Fault(f"step() returned a {type(observation).__name__}, not an Observation")
        text = self._cut(str(observation.text))
        return text, _number("step()", observation.reward), bool(observation.done)

    def _score(self, answer: str, **_: Any) -> float:
        return _number("score()", self._environment.score(answer))

    def _close(self, **_: Any) -> None:
        self._environment.close()

    def _cut(self, text: str) -> str:
        """Leave out the middle of a long text: what went wrong is often in its last line."""
        if len(text) > self._longest:
            end = self._longest // 2
            text = f"{text[: self._longest - end]}…{text[len(text) - end :]}"
        return readable(text)


def as_line(reply: Reply) -> bytes:
    """A reply as a line of JSON."""
    line = json.dumps(reply).encode() + b"\n"
    if len(line) <= LONGEST_REPLY:
        return line
    return as_line({"fault": f"it returned more than {LONGEST_REPLY >> 20} MiB", "where": None})


def secrets_of(environment: type[Environment], args: Mapping[str, Any]) -> list[str]:
    """The values of the variables that an environment's arguments name."""
    values = (os.environ.get(name, "") for name in named_variables(environment, args))
    return [value for value in values if len(value) >= SHORTEST_SECRET]


def without_secrets(value: Any, secrets: Sequence[str]) -> Any:
    """A reply, or a part of one, in whose texts `REDACTED` stands for secrets."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, REDACTED)
        return value
    if isinstance(value, Mapping):
        return {name: without_secrets(inner, secrets) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner, secrets) for inner in value]
    return value


def readable(text: str) -> str:
    """A text without halves of characters, which no tokenizer reads."""
    return text.encode("utf-8", "replace").decode("utf-8")


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise OverTime in the main thread after so many seconds."""
    if seconds is None:
        yield
        return
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _interrupt(_number: int, _frame: Any) -> None:
    raise OverTime


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value
    )


def _number(source: str, value: Any) -> float:
    """A reward."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise Fault(f"{source} gave the reward {value!r:.60}, which is not a finite number")


def _short(text: str) -> str:
    return readable(text[:LONGEST_REASON])


def _where(error: BaseException) -> str | None:
    """Where the environment's code raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if frame.filename != __file__]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else None
