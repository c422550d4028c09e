"""Generation that goes on while weights change.

A role that only generates, on ranks of its own, has its calls in a lane of their own, where they
run side by side: their responses are those of one stream. When a copy of weights arrives, the
stream pauses between two tokens, and continues with the new weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.generation import as_batch, prompts_of, submit_all
from rlcli.api.model import FinishedResponse, GeneratedResponses, Model, ResponseStream
from rlcli.recipe.schema import Recipe
from rlcli.topology import Topology
from rlcli.topology.groups import pausing_roles, prompts_in_progress

Condition = Callable[[], bool]


class PausingEngine:
    """The engine of a role as its calls see it, each in a thread of its own.

    A call is active, unless it waits for responses in `generate`. Of those that wait, one at a time
    has the stream and samples for all of them, until another thread claims it: to request
    responses, or, if no call is active, to change the weights.
    """

    def __init__(self, model: Model, max_segments: int, most_prompts: int):
        """`max_segments` of a response; new weights wait for one that has so many. `most_prompts`:
        for which the engine has responses in progress; others wait."""
        self._model = model
        self._engine = model.module
        self._max_segments = max_segments
        self._most_prompts = most_prompts
        self._changed = threading.Condition()
        self._entrance = threading.Lock()
        """Held by the call that requests responses next."""
        self._active = 0
        """Calls that do something else than wait for responses."""
        self._has_update = False
        """Whether new weights wait or are being taken: no call becomes active meanwhile."""
        self._is_taken = False
        """Whether a thread has the stream."""
        self._claims: list[Condition] = []
        """When the threads that claim the stream may have it."""
        self._stream: ResponseStream | None = None
        """Open while responses are in progress."""
        self._settings: GenerationHyperparameters | None = None
        """What the stream was opened with."""
        self._longest = 0
        """Tokens of the longest prompt that it takes: as long as any so far."""
        self._submitted, self._earlier = 0, 0
        """Responses requested of all streams, and of those before this one."""
        self._begun: dict[int, int] = {}
        """Response in progress → updates before it was requested, the oldest first."""
        self._finished: dict[int, FinishedResponse] = {}
        self._updates = 0
        self._versions: dict[int, int] = {}
        """Number of the engine's weights → their version."""
        self._failure: BaseException | None = None
        """What ended the stream."""
        self._waits = threading.local()
        """Of a call's thread: `seconds` that it has waited, while others may have been served."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def seconds_waited(self) -> float:
        """By this thread's call, for the engine or for others to sample its responses."""
        return float(getattr(self._waits, "seconds", 0.0))

    @contextmanager
    def in_use(self) -> Iterator[Model]:
        """A call of the role; gives the model that it works with."""
        self._waits.seconds = 0.0
        self._become_active()
        try:
            yield replace(self._model, module=self)
        finally:
            self._become_idle()

    @contextmanager
    def weights_may_change(self) -> Iterator[None]:
        """Pause, in order to give the engine new weights. Only one thread does this."""
        self._has_update = True
        try:
            with self._alone(lambda: not self._active and not self._is_bound):
                if self._stream is not None:
                    self._stream.pause()
                yield
                self._updates += 1
                if self._stream is not None:
                    self._stream.resume()
                    self._note_version()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            with self._changed:
                self._has_update = False
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
        if not prompts:
            empty: GeneratedResponses = self._engine.generate(input_, tokenizer, gconfig, seeds)
            return empty
        longest = max(map(len, prompts))
        self._become_idle()
        try:
            with self._entrance, self._alone(lambda: self._fits(gconfig, longest)):
                stream = self._stream or self._open(tokenizer, gconfig, longest)
                numbers = self._submit(stream, prompts, seeds)
            responses = self._collect(numbers)
        finally:
            self._become_active()
        return as_batch(responses, gconfig.routing_replay, self._versions)

    # -- the stream --------------------------------------------------------------------------------

    @property
    def _is_bound(self) -> bool:
        """Whether a response in progress has as many segments as it may."""
        oldest = next(iter(self._begun.values()), self._updates)
        return self._updates - oldest + 1 >= self._max_segments and bool(self._begun)

    def _fits(self, gconfig: GenerationHyperparameters, longest: int) -> bool:
        """Whether responses may be requested."""
        if self._stream is None:
            return True
        return self._settings == gconfig and longest <= self._longest

    def _open(
        self, tokenizer: Any, gconfig: GenerationHyperparameters, longest: int
    ) -> ResponseStream:
        self._settings, self._longest = gconfig, max(self._longest, longest)
        most = self._most_prompts * gconfig.responses_per_prompt
        at_once = min(gconfig.max_concurrent_responses, most)
        settings = replace(gconfig, max_concurrent_responses=at_once)
        stream: ResponseStream = self._engine.open(tokenizer, settings, self._longest)
        self._stream = stream
        self._note_version()
        return stream

    def _submit(
        self, stream: ResponseStream, prompts: Sequence[torch.Tensor], seeds: Sequence[int]
    ) -> list[int]:
        """Request responses; returns their numbers among those of all streams."""
        numbers = [self._earlier + number for number in submit_all(stream, prompts, seeds)]
        self._submitted += len(numbers)
        self._begun |= dict.fromkeys(numbers, self._updates)
        return numbers

    def _note_version(self) -> None:
        self._versions[self._engine.weights_number] = self._model.version.global_step

    def _collect(self, numbers: Sequence[int]) -> list[FinishedResponse]:
        """Wait for responses, and sample them and all others if no other call does."""

        def are_finished() -> bool:
            return self._finished.keys() >= set(numbers)

        while True:
            with self._changed:
                self._wait_until(
                    lambda: are_finished() or self._failure is not None or self._is_free
                )
                if are_finished():
                    return [self._finished.pop(number) for number in numbers]
                if self._failure is not None:
                    raise self._failure
                self._is_taken = True
            try:
                self._sample()
            except BaseException as error:
                self._failure = error
                raise
            finally:
                self._give_back()

    def _sample(self) -> None:
        """Sample until a response is finished, or the stream is claimed."""
        assert self._stream is not None
        for response in self._stream.collect(self._is_claimed):
            number = self._earlier + response.number
            self._finished[number] = response
            del self._begun[number]
        if not self._begun:
            self._stream.close()
            self._stream, self._earlier = None, self._submitted

    # -- threads -----------------------------------------------------------------------------------

    @property
    def _is_free(self) -> bool:
        return not self._is_taken and not self._is_claimed()

    def _is_claimed(self) -> bool:
        """Whether a thread may have the stream that claims it."""
        return any(may_have() for may_have in tuple(self._claims))

    @contextmanager
    def _alone(self, condition: Condition) -> Iterator[None]:
        """Have the stream, between two tokens, as soon as a condition holds."""
        with self._changed:
            self._claims.append(condition)
            self._wait_until(lambda: not self._is_taken and condition())
            self._claims.remove(condition)
            self._is_taken = True
        try:
            yield
        finally:
            self._give_back()

    def _wait_until(self, condition: Condition) -> None:
        began = time.perf_counter()
        self._changed.wait_for(condition)
        self._waits.seconds = self.seconds_waited + time.perf_counter() - began

    def _give_back(self) -> None:
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()

    def _become_active(self) -> None:
        with self._changed:
            self._wait_until(lambda: not self._has_update)
            self._active += 1

    def _become_idle(self) -> None:
        with self._changed:
            self._active -= 1
            self._changed.notify_all()


def pausing_engines(
    recipe: Recipe, topology: Topology, models: Mapping[str, Model]
) -> dict[str, PausingEngine]:
    """Role of this rank → its engine, for those that generate while their weights change."""
    max_segments = recipe.train.max_segments or recipe.train.max_staleness + 1
    return {
        role: PausingEngine(models[role], max_segments, prompts_in_progress(recipe, topology, role))
        for role in pausing_roles(recipe, topology)
        if role in models
    }
