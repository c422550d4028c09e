"""The contract of environments, in which a policy acts for several turns. It needs no torch.

An environment is one class in `interfaces/environments/`, an instance of which plays one episode:

    @dataclass(kw_only=True)
    class Calculator(Environment):
        def add(self, a: int, b: int) -> str:
            \"\"\"Add two numbers.\"\"\"
            return str(a + b)

    register_environment("calculator", Calculator)

Its public methods are tools, which the policy calls by name; their type hints and docstrings
describe them. A game defines `step` instead, which receives the text of each turn.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

from rlcli.api.component import register_environment
from rlcli.errors import ProjectError

__all__ = [
    "Environment", "Observation", "ToolMistake", "call_tool", "has_score", "is_game",
    "is_tool", "register_environment", "tools_of",
]  # fmt: skip

CONTRACT = ("reset", "step", "score", "close")
"""Public methods that are not tools."""


@dataclass(frozen=True)
class Observation:
    """What an action has led to."""

    text: str = ""
    """What the policy reads next; it is not read after the last turn."""
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

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        """Begin the episode of a row, whose fields are the sample's metadata (`answer`) and its
        `prompt` as a text. Everything random comes from the seed. Returns what follows the row's
        prompt before the first turn, if anything does."""
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


class ToolMistake(Exception):
    """A call of a tool that failed; its text is for the policy to read."""


def is_tool(method: str) -> bool:
    """Whether a method of an environment is a tool, judged by its name."""
    return not method.startswith("_") and method not in CONTRACT


def is_game(environment: type[Environment]) -> bool:
    return environment.step is not Environment.step


def has_score(environment: type[Environment]) -> bool:
    return environment.score is not Environment.score


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


def call_tool(environment: Environment, name: str, arguments: Mapping[str, Any]) -> str:
    """What a tool returns, as a text. Raises ToolMistake if there is no such tool, if the arguments
    do not fit its type hints, or if it raises an exception."""
    tools = tools_of(type(environment))
    if name not in tools:
        raise ToolMistake(f"there is no tool {name!r}; the tools are {', '.join(tools)}")
    tool = getattr(environment, name)
    checked = _checked(tool, name, arguments)
    try:
        return str(tool(**checked))
    except (Exception, SystemExit) as error:
        raise ToolMistake(f"{type(error).__name__}: {error}") from error


def _checked(tool: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the tool's type hints want them. Raises ToolMistake."""
    from pydantic import ConfigDict, ValidationError, create_model

    hints = get_type_hints(tool)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(tool).parameters.values():
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints.get(parameter.name, Any), default)
    model = create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)
    try:
        checked = model.model_validate_json(json.dumps(dict(arguments)))
    except (ValidationError, ValueError, RecursionError) as error:
        details = error.errors(include_url=False) if isinstance(error, ValidationError) else []
        faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in details]
        raise ToolMistake(f"{name}: {'; '.join(faults) or error}") from error
    return {field: getattr(checked, field) for field in fields}
