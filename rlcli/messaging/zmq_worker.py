"""The socket of a worker: it answers the master's requests and sends it reports."""

from __future__ import annotations

import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from rlcli.errors import RlcliError
from rlcli.messaging.control import Control
from rlcli.messaging.messages import (
    COMPUTE,
    HELLO,
    LARGEST,
    LAST_REQUEST,
    Failure,
    FailureOf,
    Fields,
    Handle,
    ProtocolError,
    Reply,
    Report,
    Request,
    pack,
    split,
    unpack,
)
from rlcli.messaging.pulse import Pulse
from rlcli.messaging.transport import reply_to
from rlcli.processes import start_time

log = logging.getLogger(__name__)


REPORT_WITHIN = 30_000
"""Milliseconds for a report to reach a busy master."""


class ZmqWorker:
    """The socket of a worker, or of another lane of it."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        node: int = 0,
        main: ZmqWorker | None = None,
        most: int = LARGEST,
    ):
        """Connect to the master listening in this folder. `main`: whose lane it is; `most`:
        bytes of a message."""
        self._most = most
        self._control = Control.read(folder)
        self._token = self._control.token
        self._rank = rank
        self.context: Any = zmq.Context() if main is None else main.context
        self._socket = self._control.connect(self.context, self._control.requests)
        self._is_main = main is None
        if main is None:
            facts = {"node": node, "started": start_time(os.getpid())}
            self.pulse = Pulse(self.context, self._control, ("rank", rank), _end_here, **facts)
        else:
            self.pulse = main.pulse
        self.pulse.watch(self._socket)

    def fail(self, failure: Failure) -> None:
        """Report to the master that this rank cannot start."""
        self._socket.send_multipart(
            self._frames(Report(self._rank, HELLO, {"pid": os.getpid()}, failure))
        )

    def report(self, name: str, value: Fields, failure: Failure | None = None) -> None:
        """Send the master an unsolicited report, from any thread: it has a socket of its own, so it
        may overtake replies and other reports."""
        self._send_apart(Report(self._rank, name, value, failure))

    def serve(
        self,
        handle: Handle,
        failure: FailureOf,
        until: str = LAST_REQUEST,
        at_once: int = 1,
        **hello: Any,
    ) -> None:
        """Say hello, with what else the master must know; then answer requests up to and including
        `until`: one by one, or side by side in up to `at_once` threads. `lanes`:
        names of the worker's other lanes, which say hello themselves, with their `lane`.

        Waiting here has no deadline: a worker ends with its parent, and on several nodes when it
        has lost the master.
        """
        self._socket.send_multipart(
            self._frames(Report(self._rank, HELLO, {"pid": os.getpid(), **hello}))
        )

        def answer(request: Request) -> Reply:
            return reply_to(request, self._rank, handle, failure)

        def answer_apart(request: Request) -> None:
            self._send_apart(answer(request))

        with ThreadPoolExecutor(at_once, hello.get("lane", COMPUTE)) as threads:
            while (request := self._next_request()).op != until:
                if at_once > 1:
                    threads.submit(answer_apart, request)
                else:
                    self._socket.send_multipart(self._frames(answer(request)))
        self._socket.send_multipart(self._frames(answer(request)))

    def _next_request(self) -> Request:
        while True:
            frames = self._socket.recv_multipart()
            try:
                request: Request = unpack(frames, self._token, Request, most=self._most)
            except ProtocolError as error:
                log.warning("a message on the control socket was discarded: %s", error)
                continue
            return request

    def _send_apart(self, message: Reply | Report) -> None:
        """Send a message from any thread, with a socket of its own."""
        socket = self._control.connect(self.context, self._control.requests)
        socket.send_multipart(self._frames(message))
        socket.close(linger=REPORT_WITHIN)

    def close(self) -> None:
        if self._is_main:
            self.pulse.close()
        self._socket.close()
        if self._is_main:
            self.context.term()

    def _frames(self, message: Reply | Report) -> list[bytes]:
        try:
            packed = pack(message, self._token)
        except (TypeError, ValueError, OverflowError) as error:
            return self._frames(_failed(message, RlcliError(f"the answer cannot be sent: {error}")))
        if len(packed) > self._most:
            size = f"of {len(packed)} bytes is too long; at most {self._most} can be sent"
            return self._frames(_failed(message, RlcliError(f"the answer {size}")))
        return split(packed)


def _failed(message: Reply | Report, error: RlcliError) -> Reply | Report:
    """The message that reports an error in place of its value."""
    return replace(message, value={}, failure=Failure.of(error, ""))


def _end_here(why: str) -> None:
    """End this process at once, whatever its other threads are doing."""
    log.error("%s: this rank ends", why)
    os.kill(os.getpid(), signal.SIGKILL)
