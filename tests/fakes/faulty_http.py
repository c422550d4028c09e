"""JSON over HTTP that fails on demand: the front end of a fake server."""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Protocol
from urllib.parse import parse_qsl

MOST_BYTES = 64 << 20


class Refused(Exception):
    """Replied to with status 400."""


class Fake(Protocol):
    """The server that answers."""

    key: str | None
    calls: list[tuple[str, Any]]
    faults: dict[str, deque[str]]

    def answer(self, path: str, body: Any) -> Any:
        """Raises Refused."""
        ...


class Text(str):
    """An answer that is not JSON."""


class QuietServer(ThreadingHTTPServer):
    """Clients may connect and disconnect at any time."""

    daemon_threads = True
    # connections beyond it are reset, and a step opens one for each response
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Speaks HTTP for a server, and injects the requested faults."""

    fake: ClassVar[Fake]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        path, _, query = self.path.partition("?")
        if query:
            body = {**(body or {}), **dict(parse_qsl(query))}
        self.fake.calls.append((path, body))
        authorization = (
            f"Bearer {self.fake.key}"
            if self.fake.key and not path.startswith(("/ready", "/health"))
            else None
        )
        if authorization is not None and self.headers.get("Authorization") != authorization:
            return self._send(401, {"error": "Unauthorized"})
        faults = self.fake.faults.get(path)
        fault = faults.popleft() if faults else None
        if fault in self.FAULTS:
            return self.FAULTS[fault](self)
        if fault == "refuse":
            return self._send(400, {"success": False, "message": "as ordered"})
        try:
            self._send(200, self.fake.answer(path, body))
        except Refused as problem:
            self._send(400, {"success": False, "message": str(problem)})

    def _send(self, status: int, answer: Any, promised: int | None = None) -> None:
        content = (answer if isinstance(answer, Text) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if promised is None else promised))
        self.end_headers()
        self.wfile.write(content)

    def _garbage(self) -> None:
        content = b"<html>502 Bad Gateway \x1b[31m</html>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _half(self) -> None:
        self._send(200, {"output_ids": [1, 2]}, promised=10_000)
        self.close_connection = True

    def _busy(self) -> None:
        self._send(503, {"error": {"message": "The request queue is full."}})

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _silence(self) -> None:
        time.sleep(30)

    def _huge(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(MOST_BYTES * 4))
        self.end_headers()
        try:
            for _ in range(4 * 64):
                self.wfile.write(b" " * (MOST_BYTES // 64))
        except OSError:
            self.close_connection = True

    FAULTS: ClassVar[dict[str, Callable[[Any], None]]] = {
        "garbage": _garbage,
        "busy": _busy,
        "half": _half,
        "reset": _reset,
        "silence": _silence,
        "huge": _huge,
    }

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
