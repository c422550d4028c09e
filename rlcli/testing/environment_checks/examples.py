"""Checks of what EXAMPLES state: the only place where an environment says what is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rlcli.api.environment import Observation, ToolMistake
from rlcli.testing.contract import Contract, skip_unless
from rlcli.testing.environment_checks.plays import CallResult, Play
from rlcli.testing.environment_checks.trial import EnvironmentTrial

STATE = 'state what the policy reads, and what it earns: "observed": ["…"], "reward": 1.0'
CORRECT = "correct the environment, or what the example states"
CLOSE = 1e-9
"""Between two rewards that are the same."""


class ExampleChecks(Contract):
    def test_examples_lead_to_what_they_state(self, trial: EnvironmentTrial) -> None:
        """EXAMPLES lead to what they state: what the policy reads, and the reward"""
        skip_unless(
            any(example.keys() & {"observed", "reward"} for example in trial.examples),
            f"not tried: EXAMPLES state no results: {STATE}",
        )
        episodes = zip(trial.examples, trial.plays, strict=False)
        for number, (example, play) in enumerate(episodes, 1):
            if "observed" in example:
                problem = _otherwise_observed(play, example["observed"])
                trial.demand(not problem, f"in example {number} {problem}", CORRECT)
            if "reward" in example:
                stated, reward = example["reward"], play.reward
                trial.demand(
                    abs(reward - stated) < CLOSE,
                    f"example {number} earns {reward:g}, not {stated:g} as it states",
                    CORRECT,
                )


def problem_of_statement(example: Mapping[str, Any]) -> str:
    """What is wrong with the form of what an example states; empty if nothing is."""
    observed, reward = example.get("observed", []), example.get("reward", 0.0)
    if not isinstance(observed, list | tuple) or not all(
        isinstance(text, str) for text in observed
    ):
        return f"observed is {observed!r:.60}, not a list of texts"
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return f"reward is {reward!r:.60}, not a number"
    return ""


def _otherwise_observed(play: Play, stated: Sequence[str]) -> str:
    """Where the policy reads something other than stated, in words; empty if nowhere."""
    texts = [_observed(step) for step in play.steps]
    for number, (text, expected) in enumerate(zip_longest(texts, stated), 1):
        if text is None:
            return f"the episode is over before result {number}, {expected!r}"
        if expected is None:
            return f"there is a result {number} that it does not state, {text!r}"
        if text != expected:
            return f"result {number} is {text!r}, not {expected!r} as it states"
    return ""


def _observed(step: CallResult) -> str:
    """What the policy reads of a call or a turn."""
    if isinstance(step.error, ToolMistake):
        return f"error: {step.error}"
    if step.error is not None:
        return str(step)
    return step.value.text if isinstance(step.value, Observation) else str(step.value)
