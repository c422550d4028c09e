"""Generation that goes on while weights change.

A role that only generates, on ranks of its own, has its calls in a lane of their own. When a copy
of weights arrives, the responses under way pause between two tokens, and continue with the new
weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.generation import as_batch, prompts_of, submit_all
from rlcli.api.model import FinishedResponse, GeneratedResponses, Model, ResponseStream


class PausingEngine:
    """The engine of a role as its calls see it: `generate` pauses for new weights.

    Two threads use it: that of the role's lane, within `in_use`, and the rank's main thread, within
    `weights_may_change`. One has the engine at a time.
    """

    def __init__(self, model: Model, max_segments: int):
        """`max_segments` of a response; new weights wait for one that has so many."""
        self._model = model
        self._engine = model.module
        self._max_segments = max_segments
        self._changed = threading.Condition()
        self._in_use = False
        self._is_awaited = False
        """Whether the main thread waits for the engine, or has it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @contextmanager
    def in_use(self) -> Iterator[Model]:
        """Have the engine for a call of the role, except while it pauses; gives the model that the
        call gets."""
        self._take_up()
        try:
            yield replace(self._model, module=self)
        finally:
            self._let_go()

    @contextmanager
    def weights_may_change(self) -> Iterator[None]:
        """Have the engine in order to give it new weights: between two tokens, or calls."""
        with self._changed:
            self._is_awaited = True
            self._changed.wait_for(lambda: not self._in_use)
        try:
            yield
        finally:
            with self._changed:
                self._is_awaited = False
                self._changed.notify_all()

    def generate(
        self,
        input_: SequenceSample,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        seeds: Sequence[int],
    ) -> GeneratedResponses:
        """As `GenerationEngine.generate`, with the versions of all segments."""
        prompts = prompts_of(input_)
        at_once = max(1, min(gconfig.max_concurrent_responses, len(seeds)))
        settings = replace(gconfig, max_concurrent_responses=at_once)
        finished: dict[int, FinishedResponse] = {}
        versions = self._present_version()

        def must_pause() -> bool:
            return self._is_awaited and len(versions) < self._max_segments

        with self._engine.open(tokenizer, settings, max(map(len, prompts), default=0)) as stream:
            numbers = submit_all(stream, prompts, seeds)
            while len(finished) < len(numbers):
                if must_pause():
                    self._pause(stream)
                    versions |= self._present_version()
                collected = stream.collect(must_pause)
                finished |= {response.number: response for response in collected}
        in_order = [finished[number] for number in numbers]
        return as_batch(in_order, gconfig.routing_replay, versions)

    def _present_version(self) -> dict[int, int]:
        """Number of the engine's weights → their version."""
        return {self._engine.weights_number: self._model.version.global_step}

    def _pause(self, stream: ResponseStream) -> None:
        """Let the weights change."""
        stream.pause()
        self._let_go()
        self._take_up()
        stream.resume()

    def _take_up(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_awaited)
            self._in_use = True

    def _let_go(self) -> None:
        with self._changed:
            self._in_use = False
            self._changed.notify_all()
