"""Streams: responses one by one, paused and continued with other weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.model import FinishedResponse, GenerationEngine, ResponseStream
from rlcli.testing.backend.base import BackendChecks, source_of
from rlcli.testing.backend.differences import require_same, require_small
from rlcli.testing.backend.generation import asked, exported, generate, response_scores
from rlcli.testing.contract import Violation, skip_if
from rlcli.testing.tiny_models import TinyTokenizer

NEW_TOKENS = 40
LONG = 100
"""New tokens; most responses end before, each at a place of its own."""
TEMPERATURE = 0.7
LONGEST = 17
GREEDY: dict[str, Any] = {"greedy": True, "temperature": 1.0, "max_new_tokens": 12}
AS_ALONE = "answer each prompt as if it were alone"


class StreamChecks(BackendChecks):
    """`open`, and what a stream does."""

    rounding = 5e-4
    """Tolerance for log-probs."""

    def test_a_stream_answers_like_a_batch(self) -> None:
        """a stream's greedy answers are those of generate"""
        engine = self.streaming_engine()
        expected = generate(engine, greedy=True).tokens
        with self.stream(engine, **GREEDY) as stream:
            numbers = _submit(stream, asked())
            responses = collect_all(stream, len(numbers))
        where = source_of(engine, "open")
        _require_numbers(responses, numbers, where)
        answers = [responses[number].tokens for number in numbers]
        require_same("responses", answers, expected, "in a stream", AS_ALONE, where)

    def test_a_stream_makes_room_for_longer_prompts(self) -> None:
        """make_room: a stream also answers longer prompts than it was opened for"""
        engine = self.streaming_engine()
        expected = generate(engine, greedy=True).tokens
        with self.stream(engine, longest=1, **GREEDY) as stream:
            answers = []
            for prompt in asked():
                stream.make_room(len(prompt))
                _submit(stream, [prompt])
                (response,) = collect_some(stream).values()
                answers.append(response.tokens)
        where = source_of(engine, "open")
        require_same("responses", answers, expected, "in a stream", AS_ALONE, where)

    def test_a_pause_changes_no_log_prob(self) -> None:
        """after a pause with new weights, recomputation confirms each segment"""
        engine, source, requests = self.streaming_engine(seed=1), self.engine(seed=2), asked() * 2
        models = {engine.weights_number: exported(engine)}
        with self.stream(engine, max_new_tokens=LONG, max_concurrent_responses=3) as stream:
            numbers = _submit(stream, requests)
            responses = collect_some(stream)
            # one pause may find every response finished or not begun
            while len(responses) < len(requests):
                stream.pause()
                engine.take_parameters(source, 0.5)
                models[engine.weights_number] = exported(engine)
                stream.resume()
                responses |= collect_some(stream)
        where = source_of(engine, "open")
        _require_numbers(responses, numbers, where)
        for number, prompt in zip(numbers, requests, strict=True):
            self._require_log_probs(prompt, responses[number], models, where)
        if all(len(response.segments) == 1 for response in responses.values()):
            raise Violation(
                f"{len(models) - 1} pauses, and no response has tokens from before and after one",
                "continue the responses in progress",
                where,
            )

    def test_abort_returns_what_there_is(self) -> None:
        """abort: returns unfinished responses, with as many log-probs as tokens"""
        engine = self.streaming_engine()
        with self.stream(engine) as stream:
            numbers = _submit(stream, asked())
            stream.pause()
            responses = _by_number([*stream.collect(), *stream.abort()])
            later_numbers = _submit(stream, asked()[:1])
            stream.resume()
            later = collect_all(stream, 1)
        where = source_of(engine, "open")
        _require_numbers(responses, numbers, where)
        _require_numbers(later, later_numbers, where)
        if any(response.is_aborted for response in later.values()):
            raise Violation("a later request is aborted too", "answer later requests", where)
        if any(len(response.tokens) != len(response.logprobs) for response in responses.values()):
            raise Violation(
                "tokens without log-probs", "return both, as far as they were generated", where
            )

    # -- parts -------------------------------------------------------------------------------------

    def streaming_engine(self, **settings: Any) -> Any:
        engine = self.generating_engine(**settings)
        skip_if(type(engine).open is GenerationEngine.open, "answers whole batches only")
        return engine

    def stream(
        self, engine: GenerationEngine, longest: int = LONGEST, **settings: Any
    ) -> ResponseStream:
        defaults = {
            "max_new_tokens": NEW_TOKENS,
            "temperature": TEMPERATURE,
            "max_concurrent_responses": 8,
        }
        gconfig = GenerationHyperparameters(**(defaults | settings))
        return engine.open(TinyTokenizer(), gconfig, longest)

    def _require_log_probs(
        self,
        prompt: torch.Tensor,
        response: FinishedResponse,
        models: dict[int, nn.Module],
        where: str,
    ) -> None:
        """Of each segment: those of the model that generated it, by the number of its weights."""
        bounds = [0, *(segment.end for segment in response.segments)]
        starts = [*(segment.start for segment in response.segments), len(response.tokens)]
        if starts != bounds:
            finding = f"{response.segments} of {len(response.tokens)} tokens"
            raise Violation(finding, "cover each token once", where)
        for segment in response.segments:
            model = models[segment.weights]
            expected = response_scores(model, prompt, response.tokens, TEMPERATURE)
            errors = (expected - response.logprobs)[segment.start : segment.end]
            cause = "read the whole prefix with the weights that continue it"
            quantity = f"log-probs of tokens {segment.start} to {segment.end}"
            apart = float(errors.abs().max())
            require_small(quantity, apart, self.rounding, "after a pause", cause, where)


def _submit(stream: ResponseStream, prompts: Iterable[torch.Tensor]) -> list[int]:
    """The numbers of requests."""
    return [stream.submit(prompt, seed) for seed, prompt in enumerate(prompts)]


def collect_all(stream: ResponseStream, count: int) -> dict[int, FinishedResponse]:
    """Collect responses by number."""
    responses: dict[int, FinishedResponse] = {}
    while len(responses) < count:
        responses |= collect_some(stream)
    return responses


def collect_some(stream: ResponseStream) -> dict[int, FinishedResponse]:
    """Collect what is finished next, by number."""
    finished = stream.collect()
    if not finished:
        raise Violation(
            "a stream with unfinished responses returns none", "wait for the next response"
        )
    return _by_number(finished)


def _by_number(responses: Iterable[FinishedResponse]) -> dict[int, FinishedResponse]:
    return {response.number: response for response in responses}


def _require_numbers(
    responses: dict[int, FinishedResponse], numbers: list[int], where: str
) -> None:
    if sorted(responses) != sorted(numbers):
        raise Violation(
            f"responses {sorted(responses)} to requests {sorted(numbers)}",
            "return each once, and continue with later requests",
            where,
        )
