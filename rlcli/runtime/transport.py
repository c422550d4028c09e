"""How requests reach workers and replies come back: plain calls in one process, or ZeroMQ on loopback.

Over ZeroMQ every message carries the run's random token; the master listens on 127.0.0.1 only. Address and token
reach the workers in a file that its owner alone can read, never on a command line.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from rlcli.errors import HangError, WorkerError
from rlcli.runtime.messages import ProtocolError, Reply, Request, pack, unpack

CONTROL_FILE = "control.json"


class Transport(Protocol):
    """The master's end."""

    def send(self, rank: int, request: Request) -> None:
        """Queue a request for a worker; workers take theirs in the order they were sent."""

    def receive(self, deadline: float, waiting_for: str) -> Reply:
        """The next reply of any worker. HangError when `deadline` (seconds from now) passes."""

    def close(self) -> None: ...


class InlineTransport:
    """One worker in this process: a request is a call, so a debugger can follow it."""

    def __init__(self, handle: Callable[[Request], dict[str, Any]]):
        self._handle = handle
        self._queue: deque[Request] = deque()

    def send(self, rank: int, request: Request) -> None:
        self._queue.append(request)

    def receive(self, deadline: float, waiting_for: str) -> Reply:
        request = self._queue.popleft()
        return Reply(request.number, 0, self._handle(request))

    def close(self) -> None:
        self._queue.clear()


class ZmqMaster:
    """The master's socket. `is_alive` raises when the workers' processes have ended."""

    def __init__(self, run_dir: Path, world_size: int, is_alive: Callable[[], None]):
        import zmq

        self._token = secrets.token_bytes(32)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 1000)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._is_alive = is_alive
        self._identities: dict[int, bytes] = {}
        self._world_size = world_size
        self.rejected = 0
        """Messages thrown away because they were not from one of our workers."""
        self._control = run_dir / CONTROL_FILE
        descriptor = os.open(self._control, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"address": f"tcp://127.0.0.1:{port}", "token": self._token.hex()}, file)

    def wait_for_workers(self, deadline: float) -> None:
        """Until every rank has said hello."""
        end = time.monotonic() + deadline
        while len(self._identities) < self._world_size:
            missing = sorted(set(range(self._world_size)) - set(self._identities))
            reply = self._next(end - time.monotonic(), f"rank {missing[0]} to start")
            if reply is not None and reply.number == HELLO:
                continue

    def send(self, rank: int, request: Request) -> None:
        import zmq

        try:
            self._socket.send_multipart([self._identities[rank], pack(request, self._token)])
        except zmq.ZMQError as error:
            self._is_alive()
            raise WorkerError(f"rank {rank} cannot be reached: {error}", where=f"rank {rank}") from error

    def receive(self, deadline: float, waiting_for: str) -> Reply:
        return self._next(deadline, waiting_for)

    def _next(self, deadline: float, waiting_for: str) -> Reply:
        end = time.monotonic() + deadline
        while True:
            if self._socket.poll(timeout=200):
                identity, frame = self._frames()
                try:
                    reply: Reply = unpack(frame, self._token, Reply)
                except ProtocolError:
                    self.rejected += 1
                    continue
                self._identities.setdefault(reply.rank, identity)
                return reply
            self._is_alive()
            if time.monotonic() > end:
                raise HangError(
                    f"no answer within {deadline:.0f} s: waiting for {waiting_for}",
                    hint="the ranks' logs say what they were doing; launch.step_deadline sets the limit",
                )

    def _frames(self) -> tuple[bytes, bytes]:
        frames = self._socket.recv_multipart()
        return frames[0], frames[-1]

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._control.unlink(missing_ok=True)


HELLO = -1
"""Number of the reply that a worker sends unasked when it is up."""


def serve(run_dir: Path, rank: int, handle: Callable[[Request], dict[str, Any]], failure: Callable[[BaseException], Any],
          until: str = "shutdown") -> None:  # fmt: skip
    """A worker's loop: answer requests one after the other until `until` was asked for."""
    import zmq

    control = json.loads((run_dir / CONTROL_FILE).read_text())
    token = bytes.fromhex(control["token"])
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(control["address"])
    socket.send(pack(Reply(HELLO, rank), token))
    for request in _requests(socket, token):
        try:
            reply = Reply(request.number, rank, handle(request))
        except Exception as error:
            reply = Reply(request.number, rank, failure=failure(error))
        socket.send(pack(reply, token))
        if request.op == until:
            break
    socket.close()
    context.term()


def _requests(socket: Any, token: bytes) -> Iterable[Request]:
    """The parent-death signal ends a worker whose master is gone, so waiting here needs no deadline of its own."""
    while True:
        if socket.poll(timeout=1000):
            yield unpack(socket.recv(), token, Request)
