"""Checks of single actions: whatever a policy writes leads to something that it can read."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator

from rlcli.api import environment
from rlcli.api.environment import ToolMistake
from rlcli.api.tool_schema import check_arguments
from rlcli.testing.contract import Contract, Violation, skip_unless
from rlcli.testing.environment_checks.plays import CallResult
from rlcli.testing.environment_checks.trial import EnvironmentTrial, Probe, is_mistake
from rlcli.testing.environment_checks.values import MARKS, comes_back
from rlcli.testing.failures import line_in

LONGEST = 1 << 16
"""Characters by which an observation may be longer than the action that it answers."""
BUGS = (
    AttributeError,
    ImportError,
    MemoryError,
    NameError,
    NotImplementedError,
    RecursionError,
    SystemExit,
    TypeError,
)
"""Exceptions that are mistakes of an environment, whatever the policy wrote."""
UNREADABLE = re.compile(r"None|b'.*'|<[\w.]+ .*at 0x[0-9a-f]+>", re.DOTALL)
"""What becomes of values that have no text."""


class ToolChecks(Contract):
    def test_tools_are_described(self, trial: EnvironmentTrial) -> None:
        """tools have type hints and docstrings, from which their JSON schemas are made"""
        for name, schema in trial.schemas.items():
            function = schema["function"]
            cause = "say in a docstring what it does: the policy reads that"
            finding = f"the tool {name} has no docstring"
            trial.demand(bool(function["description"]), finding, cause, name)
            properties = function["parameters"]["properties"]
            defaults = {
                key: field["default"] for key, field in properties.items() if "default" in field
            }
            optional = {"function": {"parameters": {"properties": properties}}}
            problems = check_arguments(optional, defaults)
            finding = f"a default of {name} does not fit its type: {'; '.join(problems)}"
            trial.demand(not problems, finding, "the policy reads both in the schema", name)
            json.dumps(schema, allow_nan=False)

    def test_schemas_are_what_functions_accept(self, trial: EnvironmentTrial) -> None:
        """a call that fits the schema of a tool is carried out"""
        skip_unless(trial.schemas, "has no tools")
        for probe in trial.probes_of("fits"):
            is_refused = is_mistake(probe.result) or _does_not_bind(probe.result)
            finding = f"{probe.title} fits its schema, but fails: {probe.result}"
            cause = "the function must accept what its type hints say"
            trial.demand(not is_refused, finding, cause, probe.tool)

    def test_wrong_arguments_are_refused(self, trial: EnvironmentTrial) -> None:
        """a call with missing, surplus or mistyped arguments is an observation"""
        skip_unless(trial.schemas, "has no tools")
        for probe in trial.probes_of("wrong"):
            finding = f"{probe.title} is carried out, or fails with {probe.result!s:.60}"
            cause = "let nothing but the schema decide what a tool accepts"
            trial.demand(is_mistake(probe.result), finding, cause, probe.tool)

    def test_faults_are_typed(self, trial: EnvironmentTrial) -> None:
        """exceptions say whose fault they are"""
        for method, result in (*_actions(trial), *_scores(trial)):
            error = result.error
            if error is None or is_mistake(result) or _does_not_bind(result):
                continue
            cause = error.__cause__ if isinstance(error, ToolMistake) else None
            if cause is None or isinstance(cause, BUGS):
                raise Violation(
                    f"{method} raises {result!s:.200}",
                    "a policy may write anything: return an observation that says what is wrong"
                    if trial.is_game
                    else "raise ValueError with words for the policy, or correct the tool",
                    line_in(cause or error, [trial.file]) or trial.location,
                )

    def test_observations_can_be_read(self, trial: EnvironmentTrial) -> None:
        """what a policy reads is a text of bounded length"""
        for method, result in () if trial.is_game else _actions(trial):
            is_text = result.error is not None or not UNREADABLE.fullmatch(str(result.value))
            finding = f"{method} returns what reads as {result.value!s:.60}"
            trial.demand(is_text, finding, "return what the policy should read, as a text")
        for probe in trial.probes:
            allowed = LONGEST + len(str(probe.action))
            length = len(str(probe.text))
            finding = f"{probe.title[:80]} returns {length} characters"
            cause = f"cut what is longer than {LONGEST}: all of it would be tokenized"
            trial.demand(length <= allowed, finding, cause, probe.tool or "step")

    def test_texts_come_back(self, trial: EnvironmentTrial) -> None:
        """a text that is repeated comes back as it was, with every character"""
        repeating: dict[tuple[str, str], str] = {}  # tool and argument → what precedes the text
        for probe in trial.probes_of("hostile"):
            text, observed = _text_of(probe), str(probe.text)
            key = (probe.tool, probe.words.partition(" in ")[2])
            beginning, mark, _ = observed.partition(MARKS[0])
            if text == "".join(MARKS) and text in observed:
                repeating[key] = beginning
            elif mark and repeating.get(key) == beginning:
                between = text[len(MARKS[0]) : -len(MARKS[1])]
                finding = f"{probe.title} comes back as {observed!r:.120}"
                cause = "pass texts on as they are: never as a format or in another encoding"
                is_same = comes_back(between, observed)
                trial.demand(is_same, finding, cause, probe.tool or "step")


def _does_not_bind(result: CallResult) -> bool:
    """Whether a tool could not even be called with the arguments."""
    cause = getattr(result.error, "__cause__", None)
    frames = traceback.extract_tb(getattr(cause, "__traceback__", None))
    return isinstance(cause, TypeError) and frames[-1].filename == environment.__file__


def _text_of(probe: Probe) -> str:
    """The hostile text of an action."""
    values = [probe.action] if isinstance(probe.action, str) else list(probe.action.values())
    marked = (value for value in values if isinstance(value, str) and value.startswith(MARKS[0]))
    return next(marked, "")


def _actions(trial: EnvironmentTrial) -> Iterator[tuple[str, CallResult]]:
    """(the action, its result) of all turns and calls but those with wrong arguments."""
    for play in (*trial.plays, *trial.wanderings):
        yield from (("a turn of an example", result) for result in play.steps)
    for probe in (*trial.probes_of("fits"), *trial.probes_of("hostile")):
        yield probe.title[:80], probe.result


def _scores(trial: EnvironmentTrial) -> Iterator[tuple[str, CallResult]]:
    """(the call, its result) of all that was scored."""
    for play in (*trial.plays, *trial.wanderings):
        if play.score is not None:
            yield f"score({play.answer!r:.30})", play.score
    for text, score in trial.scores_of_texts:
        yield f"score({text!r:.30})", score
