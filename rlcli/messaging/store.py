"""A process's end of the store through which ranks find each other, as torch.distributed uses it.

The master's end is `pulse.Store`: names and bytes, behind the socket of heartbeats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from rlcli.messaging.control import Control
from rlcli.messaging.messages import Reply, Request, pack, split, unpack

SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 1.0
"""Seconds between two questions about a name that is awaited: the pause doubles, so that thousands
of waiting processes do not keep the master busy."""
TICK = 0.2


class RunStore(Store):
    """Threads may use it at the same time: while one waits for a name, others get answers. It must
    exist for as long as the process groups that use it."""

    timeout: timedelta
    """torch's: how long a name is waited for."""

    def __init__(
        self, control: Control, context: Any, watch: Callable[[Any], None] = lambda socket: None
    ):
        """`context`: the process's for ZeroMQ; `watch`: gets the connection,
        to notice when it is lost."""
        super().__init__()
        self._socket = control.connect(context, control.pulses)
        self._token = control.token
        self._lock = threading.Lock()
        self._number = 0
        self._is_closed = False
        watch(self._socket)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._socket.close()

    # -- what torch calls, by its names ------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key=key, value=_as_bytes(value))

    def get(self, key: str) -> bytes:
        return self._await(lambda: self._ask("get", key=key), [key], self.timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key=key, amount=amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(
            "compare_set", key=key, expected=_as_bytes(expected), desired=_as_bytes(desired)
        )

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys=list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(lambda: self.check(keys) or None, keys, timeout or self.timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key=key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    deleteKey, getNumKeys = delete_key, num_keys
    """As torch's C++ code calls them."""

    def clone(self) -> RunStore:
        """The same object: no thread keeps another one waiting."""
        return self

    # -- how ---------------------------------------------------------------------------------------

    def _await(self, ask: Callable[[], Any], keys: Sequence[str], timeout: timedelta) -> Any:
        """The first answer that is not None. Raises DistStoreError, as torch's stores do."""
        end, pause = time.monotonic() + timeout.total_seconds(), SHORTEST_PAUSE
        while (answer := ask()) is None:
            if time.monotonic() > end:
                raise DistStoreError(
                    f"nothing has set {', '.join(keys)} within {timeout.total_seconds():g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return answer

    def _ask(self, op: str, **args: Any) -> Any:
        """The store's answer. Waiting for it has no deadline: a process ends with its parent, and
        on several nodes when it has lost the master."""
        with self._lock:
            self._number += 1
            if not self._is_closed:
                self._socket.send_multipart(
                    split(pack(Request(self._number, op, args), self._token))
                )
            while not self._is_closed:
                if self._socket.poll(timeout=int(TICK * 1000)):
                    reply: Reply = unpack(self._socket.recv_multipart(), self._token, Reply)
                    if reply.number == self._number:
                        return reply.value["value"]
        raise DistStoreError("the run's store is closed")


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
