"""Middleware of vLLM's server: every request needs the key.

vLLM itself demands it for some paths only, and not for those that replace weights or call methods
of workers. This file is imported by vLLM, in its environment, so it needs nothing but Python.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class KeyGuard:
    """Answers 401 to a request without one of the server's keys (`--api-key`)."""

    def __init__(self, app: App):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def _has_key(self, scope: Scope) -> bool:
        bearer = dict(scope["headers"]).get(b"authorization", b"")
        keys = scope["app"].state.args.api_key or ()
        return any(secrets.compare_digest(bearer, f"Bearer {key}".encode()) for key in keys)
