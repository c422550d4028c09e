"""A network that misbehaves: a TCP proxy on this machine whose connections can be reset, stalled or delayed."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from types import TracebackType

CHUNK = 1 << 16
TICK = 0.05


class TcpProxy:
    """Forwards to `host:port` what arrives at its own `address`."""

    def __init__(self, target: str):
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay = 0.0
        """Seconds by which everything arrives later from now on."""
        self.is_stalled = False
        """While true, nothing is read and nothing forwarded; the connections stay."""
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._ended = threading.Event()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def reset(self) -> int:
        """Break all connections, as a firewall does; new ones are served. Returns how many there were."""
        broken, self._pairs = self._pairs, []
        for pair in broken:
            for one in pair:
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    one.close()
        return len(broken)

    def close(self) -> None:
        self._ended.set()
        self._accepting.join()
        self._listener.close()
        self.reset()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            if not select.select([self._listener], [], [], TICK)[0]:
                continue
            ours, _ = self._listener.accept()
            try:
                theirs = socket.create_connection(self._target, timeout=5)
            except OSError:
                ours.close()
                continue
            self._pairs.append((ours, theirs))
            for source, sink in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        waiting = deque[tuple[float, bytes]]()
        with contextlib.suppress(OSError, ValueError):  # a socket that was closed
            while not self._ended.is_set():
                if self.is_stalled:
                    time.sleep(TICK)
                    continue
                if select.select([source], [], [], TICK if waiting or self.delay else 2 * TICK)[0]:
                    some = source.recv(CHUNK)
                    if not some:
                        break
                    waiting.append((time.monotonic() + self.delay, some))
                while waiting and waiting[0][0] <= time.monotonic() and not self.is_stalled:
                    sink.sendall(waiting.popleft()[1])
            sink.shutdown(socket.SHUT_WR)
