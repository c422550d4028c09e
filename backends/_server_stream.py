"""Responses of servers, one by one, while their weights change."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

import torch

from rlcli.api.model import FinishedResponse, ResponseStream
from rlcli.api.timing import add_span

from ._server_pool import Servers
from ._server_response import Response

ENDING_S = 5.0
"""Seconds in which servers that were asked to end all responses must have done so."""
LOOK_AGAIN_S = 0.02
"""Seconds between checks whether a caller that waits for a response wants to continue."""


class ServerStream(ResponseStream):
    """A stream with one thread for each response in progress."""

    def __init__(
        self,
        servers: Servers,
        respond: Callable[[list[int], int, threading.Event, float], Response],
        check_length: Callable[[int], None],
        most_at_once: int,
        mode: str,
        continues: bool,
    ):
        """`respond(prompt, seed, stop, asked)`. `check_length`: of a prompt. `mode` of pausing:
        retract or in_place. `continues`: what is taken from a slow server is not lost."""
        self._servers = servers
        self._respond = respond
        self._check_length = check_length
        self._mode = mode
        self._continues = continues
        self._threads = ThreadPoolExecutor(most_at_once, "response")
        self._stop = threading.Event()
        self._making: dict[Future[Response], int] = {}
        """Responses that were not collected yet, with their numbers."""
        self._done: queue.SimpleQueue[Future[Response]] = queue.SimpleQueue()
        """The finished ones among them."""
        self._one_is_done = threading.Event()
        self._submitted = 0
        self._held = ExitStack()
        self._paused = False

    def make_room(self, longest_prompt: int) -> None:
        self._check_length(longest_prompt)

    def submit(self, prompt: torch.Tensor, seed: int) -> int:
        number, self._submitted = self._submitted, self._submitted + 1
        asked = time.monotonic()
        making = self._threads.submit(self._respond, prompt.tolist(), seed, self._stop, asked)
        self._making[making] = number
        making.add_done_callback(self._note)
        return number

    def collect(self, until: Callable[[], bool] = lambda: False) -> list[FinishedResponse]:
        while self._done.empty():
            if self._paused or not self._making or until():
                return []
            self._wait_for_one()
        return self._take()

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
        self._end_all()
        finished = []
        while self._making:
            finished += self.collect()
        self._stop.clear()
        return finished

    def close(self) -> None:
        if self._making:
            self._stop.set()
            self._end_all()
        self.resume()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._making.clear()

    def _end_all(self) -> None:
        """End all responses in progress, within a few seconds."""
        self._servers.abort()
        wait(self._making, ENDING_S)
        self._servers.hang_up()

    def _note(self, response: Future[Response]) -> None:
        self._done.put(response)
        self._one_is_done.set()

    def _wait_for_one(self) -> None:
        self._one_is_done.wait(LOOK_AGAIN_S)
        self._one_is_done.clear()
        self._servers.look(slow_only=not self._continues)

    def _take(self) -> list[FinishedResponse]:
        """All finished responses."""
        finished = []
        while not self._done.empty():
            response = self._done.get()
            finished.append(response.result().finished(self._making.pop(response)))
        for span in self._servers.times.take():
            add_span(span)
        return finished
