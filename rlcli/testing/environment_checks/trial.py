"""An environment under test: played again and again, on its EXAMPLES and on what its schemas
suggest."""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import count, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlcli.api.config import EnvironmentAbstraction
from rlcli.api.environment import (
    Environment,
    ToolMistake,
    call_tool,
    has_score,
    is_game,
    schemas_of,
    states_tools,
    tools_in,
)
from rlcli.api.tool_schema import Schema
from rlcli.registry import environment_maker, load
from rlcli.testing.contract import Violation, place_of
from rlcli.testing.environment_checks.plays import CallResult, Play, Script, attempt
from rlcli.testing.environment_checks.surroundings import Conduct, watched
from rlcli.testing.environment_checks.values import (
    HOSTILE,
    LONG_TEXT,
    MARKS,
    NUMBERS,
    fitting,
    wrong,
)

USUAL_ROW = {"prompt": "What is 12+7?", "answer": "19"}
"""For environments that show no other."""
USUAL_TEXTS = ("a b c", "", "7")
WANDERINGS = 6
WANDERED_TURNS = 10
MOST_VALUES = 8
"""Values of an argument that are tried."""
SECRET = "what no episode may read"
UPWARDS = "../" * 20 + "."
STATE_SCHEMAS = "return JSON schemas as `rlcli.api.tool_schema` makes them of methods"
DATA = (bool, int, float, str, bytes, bytearray, list, dict, set, tuple, deque, count, type(None))
"""Types of values that can be compared by their text."""
Kind = str
"""How a text or the arguments of a call were chosen: `fits`, `wrong` or `hostile`."""


@dataclass(frozen=True)
class Probe:
    """A single action, with a purpose."""

    kind: Kind
    words: str
    """What is special about it."""
    tool: str
    """Empty for a game."""
    action: str | Mapping[str, Any]
    result: CallResult

    @property
    def title(self) -> str:
        return f"{self.tool or 'step'}() with {self.words}"

    @property
    def text(self) -> Any:
        """What the policy reads; None if it is not text."""
        return self.result.value if self.tool else getattr(self.result.value, "text", None)


class EnvironmentTrial:
    """An environment by name, with episodes to test it on."""

    cls: Any

    def __init__(
        self,
        name: str,
        args: Mapping[str, Any],
        folder: Path,
        examples: Sequence[Mapping[str, Any]] = (),
    ):
        """`folder`: for files that the environment writes; `examples`: instead of its EXAMPLES."""
        self.name, self.args, self.folder = name, args, folder
        self.cls = load("environments", name)
        self.location = place_of(self.cls)
        self.examples = tuple(examples or self.cls.EXAMPLES)
        self.conduct = Conduct(os.path.realpath(folder), self.cls.NETWORK)
        self.shared_values = dict(shared_values(self.cls))
        """Those of the class and its module, before it is played."""
        self._makers: dict[str, Callable[[], Environment]] = {}

    def line_of(self, method: str) -> str:
        """`file:line` of a method; of a tool that is none, that of the method which calls it."""
        tool_calling = inspect.getattr_static(self.cls, "call_tool")
        return place_of(inspect.getattr_static(self.cls, method, tool_calling))

    def demand(self, holds: bool, finding: str, cause: str, method: str = "") -> None:
        """Raise Violation, for the class or one of its methods, unless something holds."""
        if not holds:
            raise Violation(finding, cause, self.line_of(method) if method else self.location)

    @property
    def file(self) -> Path:
        return Path(self.location.rpartition(":")[0])

    @property
    def is_game(self) -> bool:
        return is_game(self.cls)

    @cached_property
    def schemas(self) -> dict[str, Schema]:
        """Those of its tools."""
        if not states_tools(self.cls):
            return schemas_of(self.cls)
        with self.watched():
            environment = self.make()
            try:
                return tools_in(environment)
            except ValueError as error:
                raise Violation(
                    f"it states tools: {error}", STATE_SCHEMAS, self.line_of("tool_schemas")
                ) from error
            finally:
                environment.close()

    def make(self, **changes: Any) -> Environment:
        """A new instance, with some arguments changed. Raises UsageError if it refuses them."""
        key = repr(sorted(changes.items()))
        if key not in self._makers:
            abstraction = EnvironmentAbstraction(self.name, {**self.args, **changes})
            self._makers[key] = environment_maker(abstraction)
        return self._makers[key]()

    @cached_property
    def scripts(self) -> list[Script]:
        """The episodes: those of EXAMPLES, and one of actions that were drawn."""
        shown = [
            Script({"prompt": "", **example.get("row", {})}, tuple(example.get("turns", ())))
            for example in self.examples
        ]
        return [*shown, Script(shown[0].row if shown else USUAL_ROW, self._drawn_turns())]

    def _drawn_turns(self) -> tuple[Any, ...]:
        if self.is_game:
            return USUAL_TEXTS
        calls = ({name: self.usual_arguments(name)} for name in self.schemas)
        return (*calls, USUAL_TEXTS[0])

    def usual_arguments(self, tool: str) -> dict[str, Any]:
        """Those of its first call in EXAMPLES, or some that fit."""
        for example in self.examples:
            for turn in example.get("turns", ()):
                if isinstance(turn, Mapping) and tool in turn:
                    return dict(turn[tool])
        properties = self._parameters(tool)["properties"].items()
        return {name: fitting(schema)[0] for name, schema in properties}

    def watched(self) -> AbstractContextManager[None]:
        """Within this context, what the process does is noted in `conduct`."""
        return watched(self.conduct)

    def play(self, script: Script, **changes: Any) -> Play:
        """Play an episode to its end, with some arguments changed."""
        with self.watched():
            return Play(self.make(**changes), script).end()

    @cached_property
    def plays(self) -> list[Play]:
        """Each episode, played."""
        return [self.play(script) for script in self.scripts]

    def conduct_of_all(self) -> Conduct:
        """What all that was tried did to the process."""
        tried = (self.plays, self.wanderings, self.scores_of_texts, self.probes, self.path_probes)
        assert None not in tried
        return self.conduct

    @cached_property
    def repeats(self) -> str:
        """How the turns of an episode differ when it is played again; empty if they do not."""
        changes = (play.change_in(self.play(play.script).trace) for play in self.plays)
        return next(filter(None, changes), "")

    @cached_property
    def wanderings(self) -> list[Play]:
        """Episodes in which the turns that EXAMPLES show come in any order."""
        shown = [turn for script in self.scripts for turn in script.turns]
        actions = [turn for turn in shown if self.is_game or isinstance(turn, Mapping)]
        if not actions:
            return []
        draw, rows = random.Random(0), [script.row for script in self.scripts]
        scripts = [
            Script(draw.choice(rows), tuple(draw.choices(actions, k=WANDERED_TURNS)), seed)
            for seed in range(WANDERINGS)
        ]
        return [self.play(script) for script in scripts]

    @cached_property
    def scores_of_texts(self) -> list[tuple[str, CallResult]]:
        """(a hostile text, its score as the answer of an episode without other turns)."""
        with self.watched():
            environment = self._begun()
            texts = [text for _, text in _texts()] if has_score(self.cls) else []
            scores = [(text, attempt(environment.score, text)) for text in texts]
            attempt(environment.close)
        return scores

    @cached_property
    def probes(self) -> list[Probe]:
        """Single actions of all kinds, each after a new beginning."""
        with self.watched():
            if self.is_game:
                return [self._probe("hostile", words, "", text) for words, text in _texts()]
            return [
                self._probe(kind, words, tool, arguments)
                for tool in self.schemas
                for kind, words, arguments in self._calls(tool)
            ]

    def probes_of(self, kind: Kind) -> list[Probe]:
        return [probe for probe in self.probes if probe.kind == kind]

    @cached_property
    def path_probes(self) -> list[Probe]:
        """Calls of its tools with the path of a file with SECRET, which is outside of the folder
        for its files, as each text."""
        probes = []
        with TemporaryDirectory() as folder:
            file = Path(folder, "secret")
            paths = {"an absolute path": str(file), "a path with ..": UPWARDS + str(file)}
            texts = [
                (tool, name)
                for tool in self.schemas
                for name, schema in self._parameters(tool)["properties"].items()
                if _is_text(schema)
            ]
            for (tool, name), (words, path) in product(texts, paths.items()):
                file.write_text(SECRET)
                arguments = {**self.usual_arguments(tool), name: path}
                with self.watched():
                    probes.append(self._probe("hostile", f"{words} in {name}", tool, arguments))
        return probes

    def _probe(self, kind: Kind, words: str, tool: str, action: Any) -> Probe:
        environment = self._begun()
        if tool:
            result = attempt(call_tool, environment, tool, action)
        else:
            result = attempt(environment.step, action)
        attempt(environment.close)
        return Probe(kind, words, tool, action, result)

    def _begun(self) -> Environment:
        """A new episode of the first row."""
        environment = self.make()
        attempt(environment.reset, dict(self.scripts[0].row), 1)
        return environment

    def _parameters(self, tool: str) -> Schema:
        return self.schemas[tool]["function"]["parameters"]

    def _calls(self, tool: str) -> Iterator[tuple[Kind, str, dict[str, Any]]]:
        """(kind, words, arguments) of calls that try each argument in turn."""
        usual = self.usual_arguments(tool)
        parameters = self._parameters(tool)
        for name in parameters.get("required", ()):
            lacking = {key: value for key, value in usual.items() if key != name}
            yield "wrong", f"no {name}", lacking
        yield "wrong", "the argument 'surplus', which it does not have", {**usual, "surplus": 1}
        for name, schema in parameters["properties"].items():
            for kind, words, value in _values(name, schema):
                yield kind, words, {**usual, name: value}


def _values(name: str, schema: Schema) -> Iterator[tuple[Kind, str, Any]]:
    """(kind, words, value) for an argument."""
    for value in fitting(schema)[:MOST_VALUES]:
        yield "fits", f"{name} = {value!r}", value
    for value in wrong(schema):
        yield "wrong", f"{name} = {value!r}", value
    if _is_text(schema):
        for words, text in _texts():
            yield "hostile", f"{words} in {name}", text


def _is_text(schema: Schema) -> bool:
    return schema.get("type") == "string" and "enum" not in schema


def _texts() -> Iterator[tuple[str, str]]:
    """(description, text) for each hostile text; the first is harmless."""
    yield "no hostile character", "".join(MARKS)
    for words, text in HOSTILE.items():
        yield words, text.join(MARKS)
    for text in NUMBERS:
        yield f"{text:.9}", text
    yield f"{len(LONG_TEXT)} characters", LONG_TEXT


def is_mistake(result: CallResult) -> bool:
    """Whether a tool refused its arguments before it was called."""
    return isinstance(result.error, ToolMistake) and result.error.__cause__ is None


def shared_values(cls: type) -> Iterator[tuple[str, str]]:
    """(name, value as a text) of what all episodes share."""
    homes: list[tuple[str, Any]] = [("", sys.modules[cls.__module__])]
    homes += [(f"{each.__name__}.", each) for each in cls.__mro__ if each.__module__ != "builtins"]
    for prefix, home in homes:
        for name, value in vars(home).items():
            if isinstance(value, DATA) and not name.startswith("__"):
                yield f"{prefix}{name}", repr(value)
