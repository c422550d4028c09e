"""The contract of environments, in which a policy acts for several turns. It needs no torch.

An environment is one class in `interfaces/environments/`, an instance of which plays one episode:

    @dataclass(kw_only=True)
    class Calculator(Environment):
        def add(self, a: int, b: int) -> str:
            \"\"\"Add two numbers.\"\"\"
            return str(a + b)

    register_environment("calculator", Calculator)

Its public methods are tools, which the policy calls by name; their type hints and docstrings
describe them. A game defines `step` instead, which receives the text of each turn. Where only an
instance knows its tools, such as those of a server, it states them: `tool_schemas`, `call_tool`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlcli.api.component import register_environment
from rlcli.api.tool_schema import Schema, check_arguments, checked_schemas, tool_schema
from rlcli.errors import ProjectError, RlcliError

__all__ = [
    "Environment", "EnvironmentFailure", "Examples", "Observation", "ToolMistake", "call_tool",
    "described", "has_score", "is_game", "is_tool", "named_variables", "register_environment",
    "schemas_of", "states_tools", "tools_in", "tools_of",
]  # fmt: skip

Examples = tuple[Mapping[str, Any], ...]

CONTRACT = ("reset", "step", "score", "close", "tool_schemas", "call_tool")
"""Public methods that are not tools."""


@dataclass(frozen=True)
class Observation:
    """What an action has led to."""

    text: str = ""
    """What the policy reads next; it is not read after the last turn. Without a chat template,
    nothing at all reads as an empty line."""
    reward: float = 0.0
    """The reward of the turn. Those of all turns and `score` add up to that of the episode."""
    done: bool = False
    """Whether the episode is over."""


class Environment:
    """What a policy acts in. A dataclass: its fields are the recipe's `environment_args`.

    An instance plays one episode and keeps its state in itself, never in globals. Its class may
    declare the following in literals.
    """

    REPRODUCIBLE: ClassVar[bool] = False
    """Whether an episode depends on its row, its seed and the actions alone. Only then are runs
    repeated and resumed bit for bit, and may ranks that share a model each play the episode."""

    REWARDS: ClassVar[tuple[float, float] | None] = None
    """The lowest and the highest reward of an episode; None: anything finite."""

    ENDS: ClassVar[bool | None] = True
    """Of a game: whether some turn ends it; False: only `max_turns` does; None: that depends on its
    arguments."""

    NETWORK: ClassVar[bool] = False
    """Whether it uses the network."""

    PRELOAD: ClassVar[tuple[str, ...]] = ()
    """Modules of libraries that its methods import. A process imports them once, before those of
    the episodes are forked from it; they must start no threads."""

    VARIABLES: ClassVar[tuple[str, ...]] = ()
    """Arguments that name variables of the environment with secrets, such as a token. They must be
    set before anything starts. Episodes see them, and what they return never contains their
    values."""

    EXAMPLES: ClassVar[Examples] = ()
    """Episodes on which `rlcli test environment` tries it. Each shows the fields of a `row` and the
    `turns` of a policy, texts or calls; with the seed 1, these lead to what the policy reads after
    each turn or call, `observed`, and to the `reward` of the episode, where they are stated:
    `{"row": {"answer": "19"}, "turns": [{"calculate": {"expression": "12+7"}}, "19"], "observed":
    ["19"], "reward": 1.0}`."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str | list[Mapping[str, Any]] | None:
        """Begin the episode of a row, whose fields are the sample's metadata (`answer`) and its
        `prompt` as a text. Everything random comes from the seed. Returns what the episode begins
        with instead of the row's prompt, if anything: the text of the user's message, after the
        row's messages before it, or, for models with a chat template, all messages."""
        return None

    def step(self, action: str) -> Observation:
        """Of a game: what the text of a turn leads to."""
        raise NotImplementedError(f"{type(self).__name__} is not a game")

    def score(self, answer: str) -> float:
        """The reward at the end of the episode, whose last turn has this text. Added to those of
        its turns; environments without it leave that to a call of the graph, or to `step`."""
        raise NotImplementedError(f"{type(self).__name__} does not score")

    def close(self) -> None:
        """End the episode, also one that is abandoned."""

    def tool_schemas(self) -> Sequence[Schema]:
        """The JSON schemas of its tools. Defined where these are not methods; may be asked of an
        environment that was never reset."""
        return list(schemas_of(type(self)).values())

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> object:
        """What one of the tools returns for arguments that fit its schema."""
        return getattr(self, name)(**arguments)


def named_variables(environment: type[Environment], args: Mapping[str, Any]) -> list[str]:
    """The variables that the arguments in `VARIABLES` of an environment name."""
    values = (args.get(name, getattr(environment, name, None)) for name in environment.VARIABLES)
    return [variable for variable in values if variable]


class ToolMistake(Exception):
    """A call of a tool that failed; its text is for the policy to read."""


class EnvironmentFailure(Exception):
    """Raised by an environment for what the policy cannot have caused, such as a server that cannot
    be reached. The episode is played once more, and then left out of training; what else a tool
    raises is for the policy to read, and what else other methods raise ends the run."""


def described(error: BaseException) -> str:
    """An exception as one text, also one that cannot be turned into a text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def is_tool(method: str) -> bool:
    """Whether a method of an environment is a tool, judged by its name."""
    return not method.startswith("_") and method not in CONTRACT


def is_game(environment: type[Environment]) -> bool:
    return environment.step is not Environment.step


def has_score(environment: type[Environment]) -> bool:
    return environment.score is not Environment.score


def states_tools(environment: type[Environment]) -> bool:
    """Whether only an instance knows its tools."""
    return environment.tool_schemas is not Environment.tool_schemas


def tools_of(environment: type[Environment]) -> tuple[str, ...]:
    """The names of an environment's tools, sorted. Raises ProjectError for one that also has a
    `step`."""
    names = tuple(
        name
        for name in dir(environment)
        if is_tool(name) and inspect.isfunction(getattr(environment, name))
    )
    if names and is_game(environment):
        raise ProjectError(
            f"{environment.__name__} has both step() and tools: {', '.join(names)}",
            where=inspect.getsourcefile(environment),
            hint="begin the names of methods that are not tools with _",
        )
    return names


def schemas_of(environment: type[Environment]) -> dict[str, Schema]:
    """The JSON schemas of an environment's tools. Raises ProjectError for a tool whose type hints
    JSON cannot express."""
    return dict(_schemas_of(environment))  # type: ignore[arg-type]


@functools.cache
def _schemas_of(environment: Any) -> dict[str, Schema]:
    try:
        return {name: tool_schema(getattr(environment, name)) for name in tools_of(environment)}
    except ValueError as error:
        where = inspect.getsourcefile(environment)
        raise ProjectError(f"{environment.__name__}: {error}", where=where) from error


def tools_in(environment: Environment) -> dict[str, Schema]:
    """The JSON schemas of an environment's tools, by their names. Raises ProjectError like
    `schemas_of`, ValueError if it states what is not a schema."""
    if states_tools(type(environment)):
        return checked_schemas(environment.tool_schemas())
    return schemas_of(type(environment))


def call_tool(environment: Environment, name: str, arguments: Mapping[str, Any]) -> str:
    """What a tool returns, as a text. Raises ToolMistake if there is no such tool, if the arguments
    do not fit its schema, or if it raises an exception. EnvironmentFailure and RlcliError,
    which the policy cannot have caused, are raised as they are."""
    schemas = tools_in(environment)
    if name not in schemas:
        raise ToolMistake(f"there is no tool {name!r}; the tools are {', '.join(schemas)}")
    problems = check_arguments(schemas[name], arguments)
    if problems:
        raise ToolMistake(f"{name}: {'; '.join(problems)}")
    try:
        return str(environment.call_tool(name, arguments))
    except (EnvironmentFailure, RlcliError):
        raise
    except (Exception, SystemExit) as error:
        raise ToolMistake(described(error)) from error
