"""Responses of an engine over transformers, one by one, while its weights change."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

import torch
from torch import nn

from rlcli.api.model import FinishedResponse, ResponseStream, Segment

from ._decoding_rows import Begun
from ._generation import BatchDecoder
from ._transformers import compute_in


class DecodingStream(ResponseStream):
    """A stream that decodes only during `collect`."""

    def __init__(
        self,
        generator: Callable[[], AbstractContextManager[nn.Module]],
        decoder: Callable[[nn.Module], BatchDecoder],
        weights_number: Callable[[], int],
        check_length: Callable[[int], None],
        longest_prompt: int,
    ):
        """`generator`: the model with its current weights; `check_length`: of a prompt with its
        response."""
        self._generator = generator
        self._make_decoder = decoder
        self._weights_number = weights_number
        self._check_length = check_length
        self._using = ExitStack()
        self._paused = False
        self._submitted = 0
        self._segments: dict[int, tuple[Segment, ...]] = {}
        """Number of a response in progress → its segments with earlier weights."""
        self._decoder = self._start()
        self._longest = 0
        """Tokens of a prompt and its response."""
        self.make_room(longest_prompt)

    def make_room(self, longest_prompt: int) -> None:
        settings = self._decoder.gconfig
        longest = longest_prompt + settings.max_new_tokens
        if longest > self._longest:
            self._check_length(longest)
            self._longest = longest
            self._decoding = self._decoder.decoding(settings.max_concurrent_responses, longest)

    def submit(self, prompt: torch.Tensor, seed: int) -> int:
        longest = len(prompt) + self._decoder.gconfig.max_new_tokens
        if not len(prompt) or longest > self._longest:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens in a stream for texts of 1 to {self._longest}"
            )
        number, self._submitted = self._submitted, self._submitted + 1
        self._decoding.submit(Begun(number, prompt, seed))
        return number

    @torch.no_grad()
    def collect(self, until: Callable[[], bool] = lambda: False) -> list[FinishedResponse]:
        if self._paused:
            return []
        if self._weights_number() != self._started_with:
            raise RuntimeError(
                "the engine was given other weights while responses were being "
                "generated: pause first"
            )
        with compute_in(self._decoder.dtype, self._decoder.device):
            while self._decoding.is_busy and not until():
                self._decoding.advance()
                if finished := self._decoding.collect():
                    return [self._finished(begun, ended=by_itself) for begun, by_itself in finished]
        return []

    def pause(self) -> None:
        if self._paused:
            return
        for begun in self._decoding.retract():
            self._segments[begun.number] = self._segments_of(begun)
        self._using.close()
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._decoder = self._start()
            self._decoding.continue_with(self._decoder)
            self._paused = False

    def abort(self) -> list[FinishedResponse]:
        begun = self._decoding.retract()
        self._decoding.clear()
        return [
            replace(self._finished(response, ended=False), is_aborted=True) for response in begun
        ]

    def close(self) -> None:
        self._decoding.retract()
        self._decoding.clear()
        self._using.close()

    def _start(self) -> BatchDecoder:
        self._started_with = self._weights_number()
        return self._make_decoder(self._using.enter_context(self._generator()))

    def _finished(self, begun: Begun, ended: bool) -> FinishedResponse:
        segments = self._segments_of(begun)
        self._segments.pop(begun.number, None)
        return FinishedResponse(
            begun.number,
            begun.tokens,
            begun.logprobs,
            ended,
            segments,
            routed_experts=begun.routes,
        )

    def _segments_of(self, begun: Begun) -> tuple[Segment, ...]:
        """Its earlier segments, and what has been sampled since; adjacent ones with the same
        weights are merged."""
        earlier = self._segments.get(begun.number, ())
        start, end = earlier[-1].end if earlier else 0, len(begun.tokens)
        if start == end:
            return earlier
        if earlier and earlier[-1].weights == self._started_with:
            return (*earlier[:-1], replace(earlier[-1], end=end))
        return (*earlier, Segment(self._started_with, start, end))
