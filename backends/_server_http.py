"""Requests to one inference server, each with a wall-clock deadline, and its answers,
which are not trusted."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rlcli.api.peer_json import Size, parsed
from rlcli.errors import RlcliError, WorkerError, escape_control

ANSWER = Size(8 << 20, 400_000)
"""Maximum size of an answer that is not a response."""
BUSY = (429, 502, 503, 504)
"""Status codes of a server that is starting or ending, or of a proxy in front of one."""
SHOWN = 200
"""Characters of an answer that an error shows."""


KEEP_ALIVE = {
    "SO_KEEPALIVE": 1,
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 6,
    "TCP_USER_TIMEOUT": 90_000,
}
"""After 30 s of silence, the other end is probed every 10 s; after 90 s without an answer the
connection is broken."""


class ServerGone(Exception):
    """There was no answer, or only half of one: the server, or the connection, may be dead."""


class ServerLate(Exception):
    """No answer within the deadline."""


class ServerRefused(Exception):
    """The server understood the request and refused it."""

    def __init__(self, status: int, text: str):
        super().__init__(f"status {status}: {text}")
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """The address of a server. It is sent `key` and nothing else about this machine;
    redirects are not followed."""

    url: str
    key: str | None = None
    hint: str | None = None
    """Follows an error about an answer that a server of this kind does not give."""
    _waits: set[_Cut] = field(default_factory=set, init=False, repr=False, compare=False)
    """For the answers to requests."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # an invalid port or address
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
        return self._parsed(path, self._ask("GET", path, None, seconds, ANSWER), ANSWER)

    def get_text(self, path: str, seconds: float) -> str:
        """An answer that is not JSON. Raises the same errors as `post`."""
        content = self._ask("GET", path, None, seconds, ANSWER)
        if len(content) > ANSWER.bytes:
            raise self.hostile(f"gives an answer to {path} of more than {ANSWER.bytes} bytes")
        return content.decode(errors="replace")

    def post(self, path: str, body: Mapping[str, Any], seconds: float, most: Size = ANSWER) -> Any:
        """The answer, decoded from JSON; None if it is empty.

        Raises ServerGone, ServerLate, ServerRefused, or WorkerError for an answer that no such
        server gives.
        """
        content = self._ask("POST", path, json.dumps(body).encode(), seconds, most)
        return self._parsed(path, content, most)

    def _ask(self, method: str, path: str, body: bytes | None, seconds: float, most: Size) -> bytes:
        """The content of an answer, or of one that is too large its beginning."""
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(parts.hostname or "", parts.port, timeout=seconds)
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Connection": "close",
        }
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        cut = _Cut(seconds)
        try:
            connection.connect()
            _keep_alive(connection.sock)
            cut.watch(connection.sock)
            self._waits.add(cut)
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read(most.bytes + 1)
        except ssl.SSLCertVerificationError as problem:
            raise self.hostile(f"has a certificate that is not trusted: {problem}") from None
        except (OSError, http.client.HTTPException) as problem:
            # ours, not the kernel's
            if cut.is_done or (isinstance(problem, TimeoutError) and problem.errno is None):
                raise ServerLate(f"no answer to {path} within {seconds:.3g} s") from None
            raise ServerGone(f"{type(problem).__name__}: {problem}") from None
        finally:
            self._waits.discard(cut)
            cut.cancel()
            connection.close()
        if cut.is_done:
            raise ServerLate(f"no answer to {path} within {seconds:.3g} s")
        self._check(path, response, content, most)
        return content

    def _check(
        self, path: str, response: http.client.HTTPResponse, content: bytes, most: Size
    ) -> None:
        missing = response.length or 0
        if missing and len(content) <= most.bytes:
            raise ServerGone(
                f"the answer to {path} ends after {len(content)} of {len(content) + missing} bytes"
            )
        if response.status in BUSY:
            raise ServerGone(f"status {response.status}: {self._shown(content)}")
        if response.status != 200:
            raise ServerRefused(response.status, self._shown(content))

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


def _keep_alive(connected: socket.socket) -> None:
    """Detect when the other end has silently gone,
    for example because its machine has lost power."""
    for name, value in KEEP_ALIVE.items():
        level = socket.SOL_SOCKET if name == "SO_KEEPALIVE" else socket.IPPROTO_TCP
        connected.setsockopt(level, getattr(socket, name), value)


class _Cut:
    """Shuts a connection down once its time is over, even if data still trickles in."""

    def __init__(self, seconds: float):
        self.is_done = False
        self._seconds = seconds
        self._timer: threading.Timer | None = None
        self._connected: socket.socket | None = None

    def watch(self, connected: socket.socket) -> None:
        self._connected = connected
        self._timer = threading.Timer(self._seconds, self.cut)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def cut(self) -> None:
        self.is_done = True
        if self._connected is not None:
            with contextlib.suppress(OSError):
                self._connected.shutdown(socket.SHUT_RDWR)
