"""A request to a server that is not trusted: with a wall-clock deadline, and an answer of limited
size. Redirects are not followed."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

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
    """No answer within the deadline, or before the request was cut off."""


class ServerUntrusted(Exception):
    """Its certificate is not trusted."""


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    content: bytes
    """Of one that is too large, the beginning."""
    retry_after: str | None
    """The header of that name."""


class HttpRequest:
    """A GET, or a POST of a `body` that is sent as JSON. The server is sent `key` and nothing else
    about this machine."""

    def __init__(self, url: str, seconds: float, body: Any = None, key: str | None = None):
        """`seconds`: the deadline, from the moment at which the answer is asked for."""
        self._url = urlsplit(url)
        self._target = self._url._replace(scheme="", netloc="").geturl()
        self._seconds = seconds
        self._body = None if body is None else json.dumps(body).encode()
        self._key = key
        self._socket: socket.socket | None = None
        self._is_cut = False

    def answer(self, most: int) -> HttpAnswer:
        """Of at most `most` bytes; a longer one is read until it has one byte more. Raises
        ServerGone, ServerLate, ServerUntrusted."""
        connection = self._connection()
        deadline = threading.Timer(self._seconds, self.cut)  # even if data still trickles in
        deadline.daemon = True
        deadline.start()
        try:
            connection.connect()
            self._keep_alive(connection.sock)
            connection.request(self._method, self._target, self._body, self._headers())
            response = connection.getresponse()
            content = response.read(most + 1)
        except ssl.SSLCertVerificationError as problem:
            raise ServerUntrusted(f"its certificate is not trusted: {problem}") from None
        except (OSError, http.client.HTTPException) as problem:
            raise self._failure(problem) from None
        finally:
            deadline.cancel()
            connection.close()
        if self._is_cut:
            raise self._late()
        self._check_length(len(content), response.length or 0, most)
        return HttpAnswer(response.status, content, response.getheader("Retry-After"))

    def cut(self) -> None:
        """Have it raise ServerLate."""
        self._is_cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _check_length(self, received: int, missing: int, most: int) -> None:
        if missing and received <= most:
            raise ServerGone(
                f"the answer to {self._target} ends after {received} of {received + missing} bytes"
            )

    @property
    def _method(self) -> str:
        return "GET" if self._body is None else "POST"

    def _connection(self) -> http.client.HTTPConnection:
        is_secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        return kind(self._url.hostname or "", self._url.port, timeout=self._seconds)

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "Connection": "close"}
        if self._body is not None:
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return headers

    def _keep_alive(self, connected: socket.socket) -> None:
        """Detect when the other end has silently gone, for example because its machine has lost
        power."""
        self._socket = connected
        for name in KEEP_ALIVE.keys() & vars(socket).keys():  # systems differ
            level = socket.SOL_SOCKET if name == "SO_KEEPALIVE" else socket.IPPROTO_TCP
            connected.setsockopt(level, getattr(socket, name), KEEP_ALIVE[name])
        if self._is_cut:
            self.cut()

    def _failure(self, problem: Exception) -> Exception:
        timed_out = isinstance(problem, TimeoutError) and problem.errno is None  # not the kernel's
        if self._is_cut or timed_out:
            return self._late()
        return ServerGone(f"{type(problem).__name__}: {problem}")

    def _late(self) -> ServerLate:
        return ServerLate(f"no answer to {self._target} within {self._seconds:.3g} s")
