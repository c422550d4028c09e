"""OpenEnv: the game of any server that speaks its protocol, `reset` and `step` over a WebSocket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.environment import (
    Environment,
    EnvironmentFailure,
    Observation,
    described,
    register_environment,
)

from ._token import check_way_of_token, token_headers

LONGEST = 1 << 16
"""Characters of an observation."""
LARGEST_MESSAGE = 1 << 24
"""Bytes of what a server sends at once."""
CLOSING_S = 2.0
"""Seconds in which a server must close a session."""
RAISED = "EXECUTION_ERROR"
"""The code of an exception that the server's game raised."""
REFUSED = "VALIDATION_ERROR"
"""The code of an action whose fields are not those of the game, or have other types."""
OF_FIELDS = ("extra_forbidden", "missing")
"""Reasons for which a server refuses the names of an action's fields, whatever their values."""


class ServerError(Exception):
    """What a server says is wrong with a message, as `code`, `message` and `errors`."""

    def __init__(self, problem: Mapping[str, Any]):
        super().__init__(f"{problem.get('message')} ({problem.get('code')})")
        self.code = problem.get("code")
        self.message = str(problem.get("message"))
        self.errors: list[Mapping[str, Any]] = problem.get("errors") or []


@dataclass(kw_only=True)
class OpenEnv(Environment):
    """Plays the game of an OpenEnv server, in a session for each episode, with the server's
    rewards. An episode begins with its row's prompt, followed by what the server says first."""

    REQUIRES: ClassVar[tuple[str, ...]] = ("websockets>=15",)
    PRELOAD: ClassVar[tuple[str, ...]] = ("websockets.sync.client",)
    NETWORK: ClassVar[bool] = True
    ENDS: ClassVar[bool | None] = None
    VARIABLES: ClassVar[tuple[str, ...]] = ("token_variable",)

    url: str
    """Address of the server, such as http://127.0.0.1:8000. It must have room for as many sessions
    as episodes are played at once."""

    action_field: str = "message"
    """Field of an action that is the text of a turn."""

    action: dict[str, str] = field(default_factory=dict)
    """The other fields of each action."""

    observation_field: str | None = None
    """Field of an observation that the policy reads; null: all of it, as JSON."""

    reset_fields: list[str] = field(default_factory=list)
    """Fields of the row that the server's `reset` gets, in addition to the seed."""

    token_variable: str | None = None
    """Environment variable with the token for `url`."""

    _connection: Any = field(init=False, repr=False, default=None)
    _session: ExitStack = field(init=False, repr=False, default_factory=ExitStack)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}; it must begin with http:// or https://")
        check_way_of_token(self.url, self.token_variable)

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        from websockets.sync.client import connect

        headers = token_headers(self.token_variable)
        address = f"ws{self.url.removeprefix('http').rstrip('/')}/ws"
        try:
            connecting = connect(
                address,
                additional_headers=headers,
                open_timeout=None,
                close_timeout=CLOSING_S,
                max_size=LARGEST_MESSAGE,
            )
            self._connection = self._session.enter_context(connecting)
        except Exception as error:
            raise _failure(error) from error
        values = {name: row[name] for name in self.reset_fields}
        try:
            reply = self._asked("reset", {"seed": seed, **values})
        except ServerError as error:
            raise _failure(error) from error
        return f"{row['prompt']}\n{self._as_text(reply)}\n"

    def step(self, action: str) -> Observation:
        text = action.encode("utf-8", "replace").decode("utf-8")
        try:
            reply = self._asked("step", {**self.action, self.action_field: text})
        except ServerError as error:
            return Observation(f"error: {self._reason(error)}"[:LONGEST])
        reward = reply.get("reward")
        return Observation(
            self._as_text(reply), 0.0 if reward is None else reward, bool(reply.get("done"))
        )

    def close(self) -> None:
        with suppress(Exception):  # the server is gone
            self._session.close()

    def _asked(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """What the server answers to a message: `observation`, `reward` and `done`. Raises
        ServerError if it says what is wrong with it, EnvironmentFailure if it does not answer."""
        from websockets.exceptions import ConnectionClosed

        try:
            with suppress(ConnectionClosed):  # the server may have said why
                self._connection.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(self._connection.recv())
            content: dict[str, Any] = reply["data"]
        except Exception as error:
            raise _failure(error) from error
        if reply["type"] == "error":
            raise ServerError(content)
        return content

    def _reason(self, error: ServerError) -> str:
        """What is wrong with an action, for the policy to read. Raises ValueError for a mistake of
        the recipe, EnvironmentFailure for one of the server."""
        if error.code == RAISED:
            return error.message
        if error.code != REFUSED:
            raise _failure(error) from error
        reasons = "; ".join(map(_in_words, error.errors)) or error.message
        if any(self._is_about_fields(problem) for problem in error.errors):
            mistake = f"the server's actions are not such: {reasons}"
            raise ValueError(f"{mistake}; set action_field and action") from error
        return reasons

    def _is_about_fields(self, problem: Mapping[str, Any]) -> bool:
        """Whether the server would refuse each text of a policy for this reason."""
        return problem["type"] in OF_FIELDS or problem["loc"][:1] != [self.action_field]

    def _as_text(self, reply: Mapping[str, Any]) -> str:
        """What the policy reads of an observation."""
        observation = reply["observation"]
        if self.observation_field is None:
            return json.dumps(observation, ensure_ascii=False)[:LONGEST]
        if self.observation_field not in observation:
            fields = ", ".join(map(str, observation))
            raise ValueError(f"an observation has no {self.observation_field!r}, but {fields}")
        return str(observation[self.observation_field])[:LONGEST]


def _in_words(problem: Mapping[str, Any]) -> str:
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def _failure(error: Exception) -> EnvironmentFailure:
    return EnvironmentFailure(f"the OpenEnv server failed: {described(error)}")


register_environment("openenv", OpenEnv)
