"""Responses of servers, one by one, while their weights change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

import torch

from rlcli.api.model import FinishedResponse, ResponseStream

from ._server_pool import Servers
from ._server_response import Response


class ServerStream(ResponseStream):
    """A stream with one thread for each response in progress."""

    def __init__(
        self,
        servers: Servers,
        respond: Callable[[list[int], int, threading.Event], Response],
        most_at_once: int,
        mode: str,
    ):
        """`respond(prompt, seed, stop)`; `mode` of pausing: retract or in_place."""
        self._servers = servers
        self._respond = respond
        self._mode = mode
        self._threads = ThreadPoolExecutor(most_at_once, "response")
        self._stop = threading.Event()
        self._making: dict[Future[Response], int] = {}
        self._submitted = 0
        self._held = ExitStack()
        self._paused = False

    def submit(self, prompt: torch.Tensor, seed: int) -> int:
        number, self._submitted = self._submitted, self._submitted + 1
        self._making[self._threads.submit(self._respond, prompt.tolist(), seed, self._stop)] = (
            number
        )
        return number

    def collect(self) -> list[FinishedResponse]:
        return self._take(
            wait(
                self._making, timeout=0 if self._paused else None, return_when=FIRST_COMPLETED
            ).done
        )

    def pause(self) -> None:
        if not self._paused:
            self._held.enter_context(self._servers.paused(self._mode))
            self._paused = True

    def resume(self) -> None:
        self._held.close()
        self._paused = False

    def abort(self) -> list[FinishedResponse]:
        self._stop.set()
        self.resume()
        self._servers.abort()
        finished = self._take(wait(self._making).done)
        self._stop.clear()
        return finished

    def close(self) -> None:
        if self._making:
            self._stop.set()
            self._servers.abort()
        self.resume()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._making.clear()

    def _take(self, done: set[Future[Response]]) -> list[FinishedResponse]:
        return [done_one.result().finished(self._making.pop(done_one)) for done_one in done]
