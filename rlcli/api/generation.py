"""Engines that write responses: whole batches at once, or prompts one by one while weights change.

A `ResponseStream` is what is beneath a batch: prompts go in and responses come out at any time. It can be paused with
responses in the making; the engine may then be given other weights, and the responses continue with those. So a
response may consist of several segments, each sampled with weights of its own.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample


@dataclass
class GeneratedResponses:
    """Responses in prompt-major order: prompt 0's group, then prompt 1's, …; N = prompts · responses_per_prompt."""

    tokens: list[torch.Tensor]
    """N tensors [R_i] int64: the response tokens, the end-of-sequence token included when it was sampled."""
    logprobs: list[torch.Tensor]
    """N tensors [R_i] float32: log-prob of each token under the temperature-divided distribution."""
    ended: torch.Tensor
    """[N] bool: the response ended by itself (False: it was cut off at max_new_tokens)."""


@dataclass(frozen=True)
class Segment:
    """Tokens of a response that were sampled with the same weights."""

    weights: int
    """`GenerationEngine.weights_number` at that time."""
    start: int
    end: int


@dataclass(frozen=True)
class FinishedResponse:
    """A response of a stream."""

    number: int
    """What `submit` returned."""
    tokens: torch.Tensor
    """[R] int64; of one that was aborted, those that it had by then."""
    logprobs: torch.Tensor
    """[R] float32: log-prob of each token under the temperature-divided distribution of its segment's weights."""
    ended: bool
    """By itself."""
    segments: tuple[Segment, ...]
    """All of its tokens, in order."""
    is_aborted: bool = False


class ResponseStream(abc.ABC):
    """Responses in the making. Used by one thread."""

    @abc.abstractmethod
    def submit(self, prompt: torch.Tensor, seed: int) -> int:
        """Ask for a response to a prompt, [n] int64; returns its number."""

    @abc.abstractmethod
    def collect(self) -> list[FinishedResponse]:
        """Those that have finished since the last time; waits for one if something is in the making and not paused."""

    @abc.abstractmethod
    def pause(self) -> None:
        """Nothing is sampled from here on. The engine may be given other weights before `resume`."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Continue what is in the making. Unless the engine was told to keep them, keys and values of what there is so
        far are computed anew: so log-probs are those that recomputation with a segment's weights gives."""

    @abc.abstractmethod
    def abort(self) -> list[FinishedResponse]:
        """End all that is in the making; returns what is finished and what there is of the others."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give up what is in the making, and give back what the stream took."""

    def __enter__(self) -> ResponseStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GenerationEngine(abc.ABC):
    """A model that writes responses."""

    @abc.abstractmethod
    def generate(
        self,
        input_: SequenceSample,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        seeds: Sequence[int],
    ) -> GeneratedResponses:
        """Sample responses to `packed_prompts`; `seeds` has one seed per response, in prompt-major order.

        A response depends on its prompt, the weights and its seed alone, never on the rest of the batch, if the backend
        is `REPRODUCIBLE`.
        """

    def stream(
        self,
        input_: SequenceSample,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        seeds: Sequence[int],
    ) -> Iterator[tuple[int, int]]:
        """The same responses token by token: (number of the response, its next token), as soon as it is sampled.

        Closing the iterator abandons what is unfinished. An engine that cannot give single tokens gives all of them
        once it is done, as here.
        """
        for number, tokens in enumerate(self.generate(input_, tokenizer, gconfig, seeds).tokens):
            for token in tokens.tolist():
                yield number, token

    @property
    def weights_number(self) -> int:
        """How often the engine has been given other weights."""
        raise NotImplementedError(f"{type(self).__name__} answers whole batches only")

    def open(self, tokenizer: Any, gconfig: GenerationHyperparameters, longest_prompt: int) -> ResponseStream:
        """A stream for prompts of at most `longest_prompt` tokens. An engine has one at a time."""
        raise NotImplementedError(f"{type(self).__name__} answers whole batches only")
