"""A misbehaving network: a TCP proxy on this machine whose connections are reset, forgotten,
stalled or delayed."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType

CHUNK = 1 << 16
TICK = 0.05


@dataclass(eq=False)
class Pair:
    """A connection: the client's half and the server's."""

    ours: socket.socket
    theirs: socket.socket
    is_forgotten: bool = False
    """The server's half is gone, and the client has not been notified."""

    def reset(self) -> None:
        for connection in (self.ours, self.theirs):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()


class TcpProxy:
    """Forwards what arrives at its own `address` to `host:port`."""

    def __init__(self, target: str):
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener: socket.socket | None = socket.create_server(("127.0.0.1", 0))
        self._place: tuple[str, int] = self._listener.getsockname()
        self.address = f"{self._place[0]}:{self._place[1]}"
        self.delay = 0.0
        """Seconds by which everything is delayed from now on."""
        self.is_stalled = False
        """While true, nothing is read or forwarded; the connections stay open."""
        self.breaks_within: int | None = None
        """Bytes of a reply after which its connection is reset; None: no limit."""
        self._pairs: list[Pair] = []
        self._listening = threading.Lock()
        self._ended = threading.Event()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def reset(self) -> int:
        """Break all connections, as a firewall does; new ones are accepted.
        Returns how many there were."""
        broken, self._pairs = self._pairs, []
        for pair in broken:
            pair.reset()
        return len(broken)

    def forget(self) -> int:
        """Drop half of each connection: the server sees it closed, the client sees nothing. New
        ones are accepted. Returns how many there were."""
        forgotten, self._pairs = self._pairs, []
        for pair in forgotten:
            pair.is_forgotten = True
            with contextlib.suppress(OSError):
                pair.theirs.shutdown(socket.SHUT_RDWR)
        return len(forgotten)

    def refuse(self) -> None:
        """Break all connections, and refuse new ones."""
        with self._listening:
            if self._listener is not None:
                self._listener.close()
                self._listener = None
        self.reset()

    def listen(self) -> None:
        """Accept new connections again, at the same address."""
        with self._listening:
            if self._listener is None:
                self._listener = socket.create_server(self._place)

    def close(self) -> None:
        self._ended.set()
        self._accepting.join()
        self.refuse()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            with self._listening:
                if self._listener is not None and select.select([self._listener], [], [], TICK)[0]:
                    self._connect(self._listener.accept()[0])
                    continue
            time.sleep(TICK / 10)

    def _connect(self, ours: socket.socket) -> None:
        try:
            theirs = socket.create_connection(self._target, timeout=5)
        except OSError:
            ours.close()
            return
        pair = Pair(ours, theirs)
        self._pairs.append(pair)
        for source, sink in ((ours, theirs), (theirs, ours)):
            threading.Thread(target=self._forward, args=(pair, source, sink), daemon=True).start()

    def _forward(self, pair: Pair, source: socket.socket, sink: socket.socket) -> None:
        waiting = deque[tuple[float, bytes]]()
        answered = 0
        with contextlib.suppress(OSError, ValueError):  # a socket that was closed
            while not self._ended.is_set():
                if self.is_stalled:
                    time.sleep(TICK)
                    continue
                if select.select([source], [], [], TICK if waiting or self.delay else 2 * TICK)[0]:
                    some = source.recv(CHUNK)
                    if not some:
                        break
                    answered += len(some) if source is pair.theirs else 0
                    if self.breaks_within is not None and answered > self.breaks_within:
                        sink.sendall(some[: len(some) - (answered - self.breaks_within)])
                        return pair.reset()
                    waiting.append((time.monotonic() + self.delay, some))
                while waiting and waiting[0][0] <= time.monotonic() and not self.is_stalled:
                    sink.sendall(waiting.popleft()[1])
            while waiting and not self._ended.wait(max(0.0, waiting[0][0] - time.monotonic())):
                sink.sendall(waiting.popleft()[1])
            if not pair.is_forgotten:
                sink.shutdown(socket.SHUT_WR)
