"""verifiers: the tasks of any taskset, with its tools, conversations and rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import (
    Environment,
    EnvironmentFailure,
    Examples,
    Observation,
    register_environment,
)
from rlcli.api.tool_schema import Schema

Message = dict[str, Any]

FIELD = "verifiers"
"""Field of a row with the data of its task; None: the first of the taskset."""
LONGEST = 1 << 16
"""Characters of an observation."""
OVER = "the episode is over"


@dataclass(kw_only=True)
class Verifiers(Environment):
    """Plays a task of verifiers: a turn that calls tools reads what they return, others what the
    environment says next, until it ends. The reward is the task's.

    Rows are those of the dataset `verifiers` for the same taskset.
    """

    REQUIRES: ClassVar[tuple[str, ...]] = ("verifiers>=0.4,<0.5",)
    PRELOAD: ClassVar[tuple[str, ...]] = ("verifiers.v1", "aiohttp.web")
    NETWORK: ClassVar[bool] = True
    ENDS: ClassVar[bool | None] = None
    EXAMPLES: ClassVar[Examples] = ({"row": {"verifiers": None}, "turns": ["1", "2"]},)

    taskset: dict[str, Any]
    """The installed taskset and its settings: `{id: gsm8k-v1}`."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Other settings of an environment, as in verifiers' `[env]`: its `id`, and those of its
    agents, such as `{agent: {max_turns: 4}}`."""

    _rollout: Any = field(init=False, repr=False, default=None)
    """The episode, a `TaskRollout`."""
    _request: Any = field(init=False, repr=False, default=None)
    """The turn that it waits for, a `TurnRequest`; None: it is over."""
    _reward: float | None = field(init=False, repr=False, default=None)
    """Of the episode, once it is over."""

    def __post_init__(self) -> None:
        if not isinstance(self.taskset.get("id"), str):
            raise ValueError("taskset has no id; it names an installed taskset: {id: gsm8k-v1}")

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Mapping[str, Any]]:
        if FIELD not in row:
            raise ValueError("the rows are not tasks: use a dataset of type verifiers")
        return [_readable(message) for message in self._begin(row[FIELD]).messages]

    def tool_schemas(self) -> list[Schema]:
        request = self._request or self._begin(None)
        return [_schema(tool["function"]) for tool in request.tools]

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        calls = {"name": name, "arguments": json.dumps(dict(arguments))}
        number = 0 if self._request is None else len(self._request.messages)
        call = {"id": f"call_{number}", "type": "function", "function": calls}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return self._after(message) if self._reward is None else OVER

    def step(self, action: str) -> Observation:
        if self._reward is None:
            text = action.encode("utf-8", "replace").decode("utf-8")
            observed = self._after({"role": "assistant", "content": text})
            return Observation(observed, done=self._request is None)
        return Observation(done=True)

    def score(self, answer: str) -> float:
        while self._reward is None:
            self._take(None)
        return self._reward

    def close(self) -> None:
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            rollout.close()

    def _begin(self, task: Mapping[str, Any] | None) -> Any:
        """Begin the episode of a task; returns the first request. Raises EnvironmentFailure,
        ValueError for settings that verifiers does not accept."""
        from ._verifiers_rollout import TaskRollout, configured

        self.close()
        self._reward = None
        self._rollout = TaskRollout(configured(self.taskset, self.settings), task)
        self._wait()
        if self._request is None:
            raise EnvironmentFailure("verifiers: the episode ended before the policy's first turn")
        return self._request

    def _after(self, message: Message) -> str:
        """What the policy reads after a turn: that is this message."""
        before = self._request
        self._take(message)
        if self._request is None:
            return ""
        seen, messages = len(before.messages), self._request.messages
        if messages[:seen] != before.messages or len(messages) <= seen:
            raise ValueError(
                "verifiers: a request of a turn does not continue the one before: the environment "
                "rewrites its conversation, or several of its agents are the policy"
            )
        return "\n".join(_readable(new)["content"] for new in messages[seen + 1 :])[:LONGEST]

    def _take(self, message: Message | None) -> None:
        self._rollout.answer(self._request, message)
        self._wait()

    def _wait(self) -> None:
        """Wait for the next request of a turn, or the end. Raises EnvironmentFailure if it fails,
        ValueError for settings that verifiers does not accept."""
        self._request = self._rollout.next_request()
        if self._request is None:
            self._reward = _reward(self._rollout.episode())


def _reward(episode: Any) -> float:
    """The reward of the policy. Raises EnvironmentFailure for an episode with an error, which
    anybody may have caused."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "no trace is complete"
        raise EnvironmentFailure(f"the episode of verifiers failed: {reason}")
    return float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))


def _readable(message: Message) -> Message:
    """A message whose content is a text, with the types of what is none."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part.get("text", f"[{part.get('type')}]") for part in content)
    return {**message, "content": content}


def _schema(function: Mapping[str, Any]) -> Schema:
    parameters = {"type": "object", "properties": {}, **function.get("parameters", {})}
    description = function.get("description") or ""
    described = {"name": function["name"], "description": description, "parameters": parameters}
    return {"type": "function", "function": described}


register_environment("verifiers", Verifiers)
