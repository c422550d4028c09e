"""Engines that write responses: whole batches at once, or prompts one by one while weights change.

A `ResponseStream` is the layer below batches: prompts go in and responses come out at any time. It
can be paused with responses in progress; the engine may then be given new weights, with which the
responses continue. So a response may consist of several segments,
each sampled with its own weights.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.errors import ModelError

Spans = list[tuple[int, int]]
"""(version, tokens): spans of a response that were sampled with weights of these versions."""


@dataclass
class GeneratedResponses:
    """Responses in prompt-major order: prompt 0's group, then prompt 1's, …; N = prompts ·
    responses_per_prompt."""

    tokens: list[torch.Tensor]
    """N tensors [R_i] int64: the response tokens, the end-of-sequence token included when it was
    sampled."""
    logprobs: list[torch.Tensor]
    """N tensors [R_i] float32: log-prob of each token under the temperature-divided
    distribution."""
    ended: torch.Tensor
    """[N] bool: whether the response ended by itself (False: it was cut off at max_new_tokens)."""
    routed_experts: list[torch.Tensor] | None = None
    """With `routing_replay`, N tensors [P_i + R_i - 1, L, k] uint8 or int16: the k experts that
    each token of prompt and response was routed to in each of the L layers with experts; the last
    token of a response has not been read. None: not requested."""
    versions: list[Spans] | None = None
    """Where weights may change while responses are in progress: for each response (version, tokens)
    of its segments, in order; the version is `Model.version.global_step`. None: all tokens were
    sampled with the weights that the role had when the call began."""


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
    """[R] int64; if it was aborted, the tokens that it had by then."""
    logprobs: torch.Tensor
    """[R] float32: log-prob of each token under the temperature-divided distribution of its
    segment's weights."""
    ended: bool
    """Whether it ended by itself."""
    segments: tuple[Segment, ...]
    """They cover all of its tokens, in order."""
    is_aborted: bool = False
    routed_experts: torch.Tensor | None = None
    """[P + R - 1, L, k] as in `GeneratedResponses`. Tokens that were processed again after a pause
    have the experts of the last pass."""


class ResponseStream(abc.ABC):
    """Responses in progress. Used by one thread."""

    @abc.abstractmethod
    def make_room(self, longest_prompt: int) -> None:
        """From now on take prompts of so many tokens, if fewer were allowed. None may be in
        progress."""

    @abc.abstractmethod
    def submit(self, prompt: torch.Tensor, seed: int) -> int:
        """Request a response to a prompt, [n] int64; returns its number."""

    @abc.abstractmethod
    def collect(self, until: Callable[[], bool] = lambda: False) -> list[FinishedResponse]:
        """Responses that have finished since the last call; waits for one if any are in progress
        and not paused. Returns without any as soon as `until`, which is asked between two tokens,
        says so."""

    @abc.abstractmethod
    def pause(self) -> None:
        """Stop sampling. The engine may be given new weights before `resume`."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Continue the responses in progress. Unless the engine is set to keep them, keys and
        values of the tokens so far are recomputed, so that log-probs are those that recomputation
        with a segment's weights gives."""

    @abc.abstractmethod
    def abort(self) -> list[FinishedResponse]:
        """End all responses in progress; returns the finished ones, and of the others what was
        sampled."""

    def spans(self, response: FinishedResponse) -> Spans | None:
        """The versions that a response was sampled with, where they change meanwhile; None: all of
        it was sampled with the weights that the role had when the call began."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Abandon the responses in progress and release the stream's resources."""

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
        """Sample responses to `packed_prompts`; `seeds` has one seed per response,
        in prompt-major order.

        If the backend is `REPRODUCIBLE`, a response depends only on its prompt, the weights and its
        seed, never on the rest of the batch.
        """

    def stream(
        self,
        input_: SequenceSample,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        seeds: Sequence[int],
    ) -> Iterator[tuple[int, int]]:
        """The same responses token by token: (number of the response, its next token),
        as soon as it is sampled.

        Closing the iterator abandons unfinished responses. An engine that cannot yield single
        tokens yields all of them at the end, as here.
        """
        for number, tokens in enumerate(self.generate(input_, tokenizer, gconfig, seeds).tokens):
            for token in tokens.tolist():
                yield number, token

    def measured(self) -> Mapping[str, tuple[float, int]]:
        """Further metrics of what the engine has done since it was last asked: name →
        (sum, count)."""
        return {}

    @property
    def weights_number(self) -> int:
        """How many times the engine has been given new weights."""
        raise NotImplementedError(f"{type(self).__name__} answers whole batches only")

    def open(
        self, tokenizer: Any, gconfig: GenerationHyperparameters, longest_prompt: int
    ) -> ResponseStream:
        """A stream for prompts of at most `longest_prompt` tokens.
        An engine has only one at a time."""
        raise NotImplementedError(f"{type(self).__name__} answers whole batches only")

    def unused(self) -> AbstractContextManager[None]:
        """A time in which the caller waits for something other than responses: weights may
        change."""
        return nullcontext()


def submit_all(
    stream: ResponseStream, prompts: Sequence[torch.Tensor], seeds: Sequence[int]
) -> list[int]:
    """Request responses to prompts, as many to each, one for each seed, in prompt-major order;
    returns their numbers. Raises ValueError if seeds and prompts do not match."""
    group, rest = divmod(len(seeds), max(len(prompts), 1))
    if rest or bool(prompts) != bool(seeds):
        raise ValueError(f"{len(seeds)} seeds for the responses to {len(prompts)} prompts")
    return [stream.submit(prompts[place // group], seed) for place, seed in enumerate(seeds)]


def as_batch(
    responses: Sequence[FinishedResponse],
    with_experts: bool,
    versions: Mapping[int, int] | None = None,
) -> GeneratedResponses:
    """Responses of a stream as a batch. `versions`: number of the engine's weights → version."""
    tokens = [response.tokens for response in responses]
    logprobs = [response.logprobs for response in responses]
    ended = torch.tensor([response.ended for response in responses], dtype=torch.bool)
    batch = GeneratedResponses(tokens, logprobs, ended)
    if with_experts:
        experts = (response.routed_experts for response in responses)
        batch.routed_experts = [rows for rows in experts if rows is not None]
    if versions is not None:
        batch.versions = [spans_of(response, versions) for response in responses]
    return batch


def spans_of(response: FinishedResponse, versions: Mapping[int, int]) -> Spans:
    """The versions of a response's segments. `versions`: number of weights → version."""
    return [
        (versions[segment.weights], segment.end - segment.start) for segment in response.segments
    ]


def prompts_of(input_: SequenceSample) -> list[torch.Tensor]:
    """One tensor of ids per prompt. Raises ModelError if one is empty."""
    prompts = list(input_.data["packed_prompts"].split(input_.flat_seqlens("packed_prompts")))
    if not all(map(len, prompts)):
        raise ModelError("a prompt has no tokens; there is nothing to answer")
    return prompts


def prompts_with_room(
    input_: SequenceSample,
    gconfig: GenerationHyperparameters,
    check_length: Callable[[int], None],
) -> list[torch.Tensor]:
    """The prompts, if the longest of them and its response are no longer than `check_length`
    permits. Raises ModelError as it does, and if a prompt is empty."""
    prompts = prompts_of(input_)
    check_length(max(map(len, prompts), default=0) + gconfig.max_new_tokens)
    return prompts


def check_positions(role: str, longest: int, config: Any) -> None:
    """Check that a model with this configuration of transformers has as many positions as a prompt
    and its response take. Raises ModelError."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ModelError(
            (
                f"prompt and response of role {role} may reach {longest} tokens; the model has "
                f"{limit} positions"
            ),
            hint="lower generation.max_new_tokens or the dataset's max_length",
        )
