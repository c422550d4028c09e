"""Generation that continues while weights change.

A role that only generates, on ranks of its own, has its calls in a lane of their own, where they
run side by side: their responses are those of one stream. When a copy of weights arrives, the
stream pauses between two tokens, and continues with the new weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.generation import Spans, as_batch, prompts_of, spans_of, submit_all
from rlcli.api.model import (
    FinishedResponse,
    GeneratedResponses,
    GivesParameters,
    Model,
    ResponseStream,
)
from rlcli.api.timing import apart, waiting
from rlcli.recipe.schema import Recipe
from rlcli.topology import Topology
from rlcli.topology.groups import pausing_roles, prompts_in_progress

if TYPE_CHECKING:
    import torch

Condition = Callable[[], bool]
Wait = Callable[[], AbstractContextManager[None]]
"""Records how long a thread waits."""
FOR_OTHERS: Wait = partial(apart, "other calls that sample")
FOR_WEIGHTS: Wait = partial(apart, "new weights")
FOR_RESPONSES: Wait = partial(waiting, "responses to pause")
"""The seconds of a call are those in which it samples itself; those of a copy end when the weights
are in use."""
Response = tuple[ResponseStream, int]
"""A response that was requested: its stream, and its number there."""


class Handover:
    """Which thread has the stream: one at a time.

    Threads that wait for responses share the sampling. Others claim the stream, each with the
    condition under which it may have it; the thread that samples asks between two tokens whether
    one may, and then hands it over. A failure ends all waiting.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        self._claims: list[Condition] = []
        self._failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Have all threads that wait, now or later, raise the first error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    @contextmanager
    def change(
        self, condition: Condition = lambda: True, wait: Wait = nullcontext
    ) -> Iterator[None]:
        """Change what others wait for, once a condition holds; `wait` records how long that takes.
        Raises the failure, if there is one."""
        with self._changed:
            with wait():
                self._changed.wait_for(lambda: self._failure is not None or condition())
            if self._failure is not None:
                raise self._failure
            yield
            self._changed.notify_all()

    def is_claimed(self) -> bool:
        """Whether a thread may have the stream that claims it."""
        return any(may_have() for may_have in tuple(self._claims))

    @contextmanager
    def claim(self, may_have: Condition, wait: Wait) -> Iterator[None]:
        """Have the stream, between two tokens, as soon as a condition holds; `wait` records how
        long that takes."""
        self._claims.append(may_have)
        try:
            with self.change(lambda: not self._is_taken and may_have(), wait):
                self._is_taken = True
        finally:
            self._claims.remove(may_have)
        try:
            yield
        finally:
            self._give_back()

    def share(self, sample: Callable[[], None], is_done: Condition, until: Condition) -> None:
        """Sample until a condition holds, whenever no other thread samples or claims the stream.
        `until`: another such condition, asked between two tokens; whoever samples hands over."""

        def is_over() -> bool:
            return until() or is_done()

        self._claims.append(until)

        def may_continue() -> bool:
            return is_over() or not (self._is_taken or self.is_claimed())

        try:
            while True:
                with self.change(may_continue, FOR_OTHERS):
                    if is_over():
                        return
                    self._is_taken = True
                try:
                    sample()
                except BaseException as error:
                    self.fail(error)
                    raise
                finally:
                    self._give_back()
        finally:
            with self._changed:
                self._claims.remove(until)
                self._changed.notify_all()

    def _give_back(self) -> None:
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()


class PausingEngine:
    """The engine of a role as its calls see it, each in a thread of its own.

    A call is active, unless it waits for responses in `generate`. Those that wait sample for all of
    them, in turn; the stream is claimed to request responses, or, if no call is active, to change
    the weights.
    """

    def __init__(self, model: Model, max_segments: int, most_prompts: int):
        """`max_segments`: of a response; new weights wait for a response that has reached it.
        `most_prompts`: the most prompts for which the engine has responses in progress; others
        wait."""
        self._model = model
        self._engine = model.module
        self._max_segments = max_segments
        self._most_prompts = most_prompts
        self._threads = Handover()
        self._entrance = threading.Lock()
        """Held by the call that requests responses next."""
        self._active = 0
        """Calls that do something else than wait for responses."""
        self._has_update = False
        """Whether new weights wait or are being taken: no call becomes active meanwhile."""
        self._stream: ResponseStream | None = None
        """Open while responses are in progress."""
        self._settings: GenerationHyperparameters | None = None
        """What the stream was opened with."""
        self._longest = 0
        """Tokens of the longest prompt that it takes: as long as any so far."""
        self._begun: dict[Response, int] = {}
        """Response in progress → versions so far when it was requested, the oldest first."""
        self._finished: dict[Response, FinishedResponse] = {}
        self._versions: dict[int, int] = {}
        """Number of the engine's weights → their version."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @contextmanager
    def in_use(self) -> Iterator[Model]:
        """A call of the role; gives the model that it works with."""
        self._become_active()
        try:
            yield replace(self._model, module=self)
        finally:
            self._become_idle()

    def receive_parameters(self, source: GivesParameters, eta: float) -> Callable[[], None]:
        """Receive new weights while responses go on. What prevents it ends the stream."""
        try:
            take: Callable[[], None] = self._engine.receive_parameters(source, eta)
        except BaseException as error:
            self._threads.fail(error)
            raise
        return take

    @contextmanager
    def weights_may_change(self) -> Iterator[None]:
        """Pause, in order to give the engine new weights. Only one thread does this. Raises what
        has ended the stream."""
        self._has_update = True
        try:
            with self._threads.claim(
                lambda: not self._active and not self._is_bound, FOR_RESPONSES
            ):
                if self._stream is not None:
                    self._stream.pause()
                yield
                if self._stream is not None:
                    self._stream.resume()
                    self._note_version()
        except BaseException as error:
            self._threads.fail(error)
            raise
        with self._threads.change():
            self._has_update = False

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
        with self.unused():
            responses = self.request(tokenizer, gconfig, longest, prompts, seeds)
            self._threads.share(
                self._sample, lambda: self._finished.keys() >= set(responses), lambda: False
            )
        finished = [self._finished.pop(response) for response in responses]
        return as_batch(finished, gconfig.routing_replay, self._versions)

    def open(
        self, tokenizer: Any, gconfig: GenerationHyperparameters, longest_prompt: int
    ) -> ResponseStream:
        """As `GenerationEngine.open`, for one call: several may be open at once."""
        return CallStream(self, tokenizer, gconfig, longest_prompt)

    def request(
        self,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        longest: int,
        prompts: Sequence[torch.Tensor],
        seeds: Sequence[int],
    ) -> list[Response]:
        """Request responses of the stream that all calls share. If it does not fit, sample until it
        is closed: calls with responses there may all wait for the entrance."""

        def fits() -> bool:
            return self._stream is None or (self._settings == gconfig and longest <= self._longest)

        with self._entrance:
            self._threads.share(self._sample, fits, lambda: False)
            with self._threads.claim(fits, FOR_OTHERS):
                stream = self._stream or self._open(tokenizer, gconfig, longest)
                responses = [(stream, n) for n in submit_all(stream, prompts, seeds)]
                self._begun |= dict.fromkeys(responses, len(self._versions))
        return responses

    def take_finished(
        self, responses: Collection[Response], until: Condition
    ) -> dict[Response, FinishedResponse]:
        """Those of some responses that have finished; waits for one, or `until` a condition
        holds."""
        with self.unused():
            self._threads.share(
                self._sample, lambda: not self._finished.keys().isdisjoint(responses), until
            )
        finished = [response for response in responses if response in self._finished]
        return {response: self._finished.pop(response) for response in finished}

    def spans(self, response: FinishedResponse) -> Spans:
        """The versions of a response's segments."""
        return spans_of(response, self._versions)

    # -- the stream --------------------------------------------------------------------------------

    @property
    def _is_bound(self) -> bool:
        """Whether a response in progress has as many segments as it may."""
        oldest = next(iter(self._begun.values()), None)
        return oldest is not None and len(self._versions) - oldest + 1 >= self._max_segments

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

    def _note_version(self) -> None:
        self._versions[self._engine.weights_number] = self._model.version.global_step

    def _sample(self) -> None:
        """Sample until a response is finished, or the stream is claimed."""
        assert self._stream is not None
        for response in self._stream.collect(self._threads.is_claimed):
            self._finished[self._stream, response.number] = response
            del self._begun[self._stream, response.number]
        if not self._begun:
            self._stream.close()
            self._stream = None

    # -- calls -------------------------------------------------------------------------------------

    @contextmanager
    def unused(self) -> Iterator[None]:
        """A time in which a call waits: weights may change."""
        self._become_idle()
        try:
            yield
        finally:
            self._become_active()

    def _become_active(self) -> None:
        """Wait for new weights that come first, and sample the responses that these wait for."""

        def need_responses() -> bool:
            return self._has_update and self._is_bound

        while True:
            self._threads.share(self._sample, lambda: not need_responses(), lambda: False)
            with self._threads.change(
                lambda: not self._has_update or need_responses(), FOR_WEIGHTS
            ):
                if not self._has_update:
                    self._active += 1
                    return

    def _become_idle(self) -> None:
        with self._threads.change():
            self._active -= 1


class CallStream(ResponseStream):
    """The responses of one call among those of the stream that all calls of a role share."""

    def __init__(
        self,
        engine: PausingEngine,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        longest_prompt: int,
    ):
        self._engine = engine
        self._request = partial(engine.request, tokenizer, gconfig)
        self._longest = longest_prompt
        self._numbers: dict[Response, int] = {}
        """Response in progress → its number for the call."""
        self._submitted = 0

    def make_room(self, longest_prompt: int) -> None:
        self._longest = max(self._longest, longest_prompt)

    def submit(self, prompt: torch.Tensor, seed: int) -> int:
        (response,) = self._request(self._longest, [prompt], [seed])
        self._numbers[response] = self._submitted
        self._submitted += 1
        return self._submitted - 1

    def collect(self, until: Callable[[], bool] = lambda: False) -> list[FinishedResponse]:
        if not self._numbers or until():
            return []
        finished = self._engine.take_finished(tuple(self._numbers), until)
        return [
            replace(response, number=self._numbers.pop(key)) for key, response in finished.items()
        ]

    def spans(self, response: FinishedResponse) -> Spans:
        return self._engine.spans(response)

    def pause(self) -> None:
        raise NotImplementedError("the engine pauses the stream of all calls")

    def resume(self) -> None:
        raise NotImplementedError("the engine resumes the stream of all calls")

    def abort(self) -> list[FinishedResponse]:
        raise NotImplementedError("the responses of one call are not ended alone")

    def close(self) -> None:
        """Nothing of its own is open; the shared stream closes with its last response."""


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
