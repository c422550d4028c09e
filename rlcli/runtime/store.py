"""The master's end of the store through which the run's ranks, and their agents, find each other: names and bytes.

torch's own stores would listen on every interface and accept anything that anyone sends, or lock a file, which not
every shared file system can do. This one is behind a socket of the run (see `control`). Every question is answered at
once; whoever waits for a name asks again (see `store_client`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rlcli.runtime.control import Listening, join, split, zeromq
from rlcli.runtime.messages import ProtocolError, Reply, Request, pack, unpack

log = logging.getLogger(__name__)

TICK = 0.2


class Store:
    """What the store holds. Its semantics are those of torch's TCPStore."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = b"%d" % total
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a value if the present one is the expected one, or missing and expected to be empty. Returns the value
        that it has then, or the expected one if it has none."""
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def count(self) -> int:
        return len(self._values)


class StoreServer:
    """Answers the processes of a run from a thread, whatever the master is busy with."""

    def __init__(self, listening: Listening):
        self._socket, self._token = listening.store, listening.control.token
        store = Store()
        self._operations: dict[str, Callable[..., Any]] = {
            name: getattr(store, name) for name in ("set", "get", "add", "compare_set", "check", "delete", "count")
        }
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._ended.is_set():
            if self._socket.poll(timeout=int(TICK * 1000)):
                self._answer(*self._socket.recv_multipart())

    def _answer(self, identity: bytes, *frames: bytes) -> None:
        zmq = zeromq()

        try:
            request: Request = unpack(join(frames), self._token, Request)
            value = self._operations[request.op](**request.args)
        except (ProtocolError, LookupError, TypeError, ValueError) as error:
            log.warning("a question to the store was thrown away: %s", error)
            return
        answer = pack(Reply(request.number, 0, {"value": value}), self._token)
        try:
            self._socket.send_multipart([identity, *split(answer)], zmq.NOBLOCK)
        except zmq.ZMQError:  # it has left; whoever watches it will notice
            return
