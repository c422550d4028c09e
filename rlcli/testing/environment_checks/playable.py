"""The prerequisite of the other checks: an environment that can be made and played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlcli.api.environment import has_score
from rlcli.errors import RlcliError
from rlcli.testing.contract import Contract, Violation, skip_without_arguments
from rlcli.testing.environment_checks.examples import STATE, problem_of_statement
from rlcli.testing.environment_checks.plays import Script
from rlcli.testing.environment_checks.trial import EnvironmentTrial

SHOW_EPISODES = (
    'show rows and turns that it can be played with: EXAMPLES = ({"row": {…}, "turns": […]},)'
)
FIELDS = ("row", "turns", "observed", "reward")
"""Of an example."""


class PlayableChecks(Contract):
    """Whether there is anything to check. Last among the bases, so that it is reported first."""

    examples: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Episodes to play; empty: the EXAMPLES of its class."""

    @pytest.fixture(scope="class")
    def trial(self, request: pytest.FixtureRequest, tmp_path_factory: Any) -> EnvironmentTrial:
        """The environment, which a check may play as often as it likes."""
        trial = trial_of(request.cls, tmp_path_factory.mktemp("environment"))
        try:
            check_playable(trial)
        except (Violation, RlcliError):  # reported by the check for it
            pytest.skip("not tried: it cannot be played")
        return trial

    def test_can_be_played(self, tmp_path: Any) -> None:
        """it can be played with its EXAMPLES"""
        trial = trial_of(type(self), tmp_path)
        trial.demand(
            trial.is_game or has_score(trial.cls) or bool(trial.schemas),
            f"{trial.cls.__name__} has neither tools nor step() nor score()",
            "a public method is a tool: give it type hints and a docstring",
        )
        check_playable(trial)


def trial_of(contract: type[PlayableChecks], folder: Path) -> EnvironmentTrial:
    """The environment of a contract. Skips the check if it needs arguments that are not given."""
    args = dict(contract.args)
    skip_without_arguments(contract.kind, contract.name, args)
    return EnvironmentTrial(contract.name, args, folder, contract.examples)


def check_playable(trial: EnvironmentTrial) -> None:
    """Raise Violation for an environment that does not take its EXAMPLES."""
    assert trial.schemas is not None  # a tool without type hints raises ProjectError
    _check_examples(trial)
    for number, script in enumerate(trial.scripts, 1):
        _check_turns(trial, script)
        beginning = trial.play(Script(script.row, ())).beginning
        is_shown = number <= len(trial.examples)
        subject = f"example {number}" if is_shown else f"the row {dict(script.row)}"
        trial.demand(
            beginning.error is None,
            f"reset() refuses {subject}: {beginning}",
            SHOW_EPISODES,
            "reset",
        )
        _check_beginning(trial, beginning.value)


def _check_examples(trial: EnvironmentTrial) -> None:
    """An example has no other fields, and states what an episode can lead to."""
    for number, example in enumerate(trial.examples, 1):
        unexpected = ", ".join(sorted(example.keys() - FIELDS))
        trial.demand(
            not unexpected,
            f"example {number} has {unexpected}, besides {', '.join(FIELDS)}",
            SHOW_EPISODES,
        )
        problem = problem_of_statement(example)
        trial.demand(not problem, f"in example {number} {problem}", STATE)


def _check_beginning(trial: EnvironmentTrial, beginning: Any) -> None:
    are_messages = isinstance(beginning, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in beginning
    )
    trial.demand(
        beginning is None or isinstance(beginning, str) or are_messages,
        f"reset() returns a {type(beginning).__name__}, neither a text nor messages",
        "return the user's text, a list of messages, or None for the row's prompt",
        "reset",
    )


def _check_turns(trial: EnvironmentTrial, script: Script) -> None:
    """A turn is a text or, with tools, a call of them."""
    for turn in script.turns:
        is_call = isinstance(turn, Mapping) and turn.keys() <= trial.schemas.keys()
        trial.demand(
            isinstance(turn, str) or is_call,
            f"the turn {turn!r} of an example is neither a text nor a call",
            f"write {{tool: arguments}}; its tools are {', '.join(trial.schemas) or 'none'}",
        )
