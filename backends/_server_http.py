"""Requests to one inference server, each with a wall-clock deadline, and its answers,
which are not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rlcli.api.http_request import HttpRequest, ServerGone, ServerLate, ServerUntrusted
from rlcli.api.peer_json import Size, parsed
from rlcli.errors import RlcliError, WorkerError, escape_control

ANSWER = Size(8 << 20, 400_000)
"""Maximum size of an answer that is not a response."""
BUSY = (429, 503)
"""Status codes of a server that takes no more requests, or is starting or ending."""
AWAY = (502, 504)
"""Those of a proxy whose server does not answer."""
SHOWN = 200
"""Characters of an answer that an error shows."""


@dataclass(frozen=True)
class Deadlines:
    """Deadlines in seconds."""

    request: float
    update: float


class ServerBusy(ServerGone):
    """The server, or a proxy in front of it, takes no more requests now."""


class ServerRefused(Exception):
    """The server understood the request and refused it."""

    def __init__(self, status: int, text: str):
        super().__init__(f"status {status}: {text}")
        self.status = status


NOT_DONE = (ServerGone, ServerLate, ServerRefused)
"""What a request raises that its server has not carried out, as far as is known."""


@dataclass(frozen=True)
class Endpoint:
    """The address of a server. It is sent `key` and nothing else about this machine;
    redirects are not followed."""

    url: str
    key: str | None = None
    hint: str | None = None
    """Follows an error about an answer that a server of this kind does not give."""
    _waits: set[HttpRequest] = field(default_factory=set, init=False, repr=False, compare=False)
    """Requests whose answers have not come yet."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            host = (parts.hostname or "").encode("idna")  # as a connection needs it
            is_one = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
        except ValueError:  # an invalid port, address or name
            is_one = False
        if not is_one or parts.path.strip("/") or parts.username:
            raise ValueError(
                f"the url of a server is {self.url!r}; it must be like http://127.0.0.1:30000"
            )

    @property
    def host(self) -> str:
        return str(urlsplit(self.url).hostname)

    def hang_up(self) -> None:
        """Have the requests that wait for an answer raise ServerLate."""
        for wait in tuple(self._waits):
            wait.cut()

    def get(self, path: str, seconds: float) -> Any:
        """Raises the same errors as `post`."""
        return self._parsed(path, self._ask(path, None, seconds, ANSWER), ANSWER)

    def get_text(self, path: str, seconds: float) -> str:
        """An answer that is not JSON. Raises the same errors as `post`."""
        content = self._ask(path, None, seconds, ANSWER)
        if len(content) > ANSWER.bytes:
            raise self.hostile(f"gives an answer to {path} of more than {ANSWER.bytes} bytes")
        return content.decode(errors="replace")

    def post(self, path: str, body: Mapping[str, Any], seconds: float, most: Size = ANSWER) -> Any:
        """The answer, decoded from JSON; None if it is empty.

        Raises ServerGone, ServerLate, ServerRefused, or WorkerError for an answer that no such
        server gives.
        """
        content = self._ask(path, body, seconds, most)
        return self._parsed(path, content, most)

    def _ask(self, path: str, body: Mapping[str, Any] | None, seconds: float, most: Size) -> bytes:
        """The content of an answer, or of one that is too large its beginning."""
        url = urlsplit(self.url)._replace(path=path, query="", fragment="").geturl()
        request = HttpRequest(url, seconds, body, self.key)
        self._waits.add(request)
        try:
            answer = request.answer(most.bytes)
        except ServerUntrusted as problem:
            raise self.hostile(f"was not asked: {problem}") from None
        finally:
            self._waits.discard(request)
        shown = self._shown(answer.content)
        if answer.status in (*BUSY, *AWAY):
            kind = ServerBusy if answer.status in BUSY else ServerGone
            raise kind(f"status {answer.status}: {shown}")
        if answer.status != 200:
            raise ServerRefused(answer.status, shown)
        return answer.content

    def _parsed(self, path: str, content: bytes, most: Size) -> Any:
        if len(content) <= most.bytes and not content.strip():
            return None
        try:
            return parsed(content, most)
        except ValueError as problem:
            raise self.hostile(
                f"gives an answer to {path} {problem}: {self._shown(content)!r}"
            ) from None

    def _shown(self, content: bytes) -> str:
        text = escape_control(content[:SHOWN].decode(errors="replace"))
        return text.replace(self.key, "<redacted>") if self.key else text

    def hostile(self, message: str) -> RlcliError:
        """An error about an answer that no server of this kind gives."""
        return WorkerError(f"the server at {self.url} {message}", hint=self.hint, code="F90")
