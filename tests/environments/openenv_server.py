"""A parrot for tests: an OpenEnv server on a port of this machine, which it prints. Its argument is
the number of sessions that it has room for. With a token in the variable PARROT_TOKEN it refuses
those who do not have it."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

TOKEN = os.environ.get("PARROT_TOKEN", "")
EXPECTED = f"Bearer {TOKEN}".encode()


class Words(Action):
    """What a player says."""

    message: str = Field(max_length=1 << 21)
    language: str = "English"


class Reply(Observation):
    """What the game answers."""

    text: str


class Parrot(Environment[Words, Reply, State]):
    """Repeats what it reads, which is worth a point a word, and ends with a goodbye."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed: int = 0, level: str = "easy", **_: object) -> Reply:
        knows = f"It knows {TOKEN}: " if TOKEN else ""
        return Reply(text=f"{knows}an {level} parrot, {seed}")

    def step(self, action: Words, timeout_s: float | None = None, **_: object) -> Reply:
        self._state.step_count += 1
        if action.message == "hatch":
            raise ValueError("parrots lay eggs")
        if action.message == "leave":
            os._exit(3)
        if action.message == "sleep":
            time.sleep(60)
        if action.message == "count":
            return Reply(text=str(self._state.step_count))
        words = float(len(action.message.split()))
        text = f"{action.language}: {action.message}"
        return Reply(text=text, reward=words or None, done=action.message == "goodbye")

    @property
    def state(self) -> State:
        return self._state


def guarded(app: Any) -> Any:
    """The application for those who have the token."""

    async def gate(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "websocket" and headers.get(b"authorization") != EXPECTED:
            await send({"type": "websocket.close", "code": 1008})  # HTTP 403: none was accepted
        else:
            await app(scope, receive, send)

    return gate if TOKEN else app


if __name__ == "__main__":
    rooms = int(sys.argv[1])
    app = guarded(create_fastapi_app(Parrot, Words, Reply, max_concurrent_envs=rooms))
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    server.run(sockets=[listener])
