"""A response as it grows: the requests for it, and the answers that contain its pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from rlcli.api.config import stable_seed
from rlcli.api.model import FinishedResponse, Segment

from ._server_answers import Answer, Sampling
from ._server_dialect import ResponseRequest, new_id
from ._server_experts import bytes_of_experts


@dataclass
class Response:
    """A response as sampled so far."""

    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    is_aborted: bool = False
    experts: torch.Tensor | None = None
    """The experts of all tokens that were read, as in `FinishedResponse.routed_experts`."""

    @property
    def has_ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.sampling.ends

    def add(self, answer: Answer, number_of: Callable[[str], int]) -> None:
        """Append an answer, up to the first id that has no token: that one is resampled, which
        makes the others as likely as if it could not be drawn. `number_of`: the server's label of
        weights → their number."""
        beyond = (
            place for place, token in enumerate(answer.tokens) if token >= self.sampling.tokens
        )
        end, before = next(beyond, len(answer.tokens)), len(self.tokens)
        self.tokens += answer.tokens[:end]
        self.logprobs += answer.logprobs[:end]
        if answer.experts is not None:  # also of what was requested: it has been read again
            self.experts = answer.experts[: len(answer.experts) - (len(answer.tokens) - end)]
        for span in answer.spans:
            self._extend(
                Segment(number_of(span.label), before + span.start, before + min(span.end, end))
            )

    def _extend(self, segment: Segment) -> None:
        if segment.start >= segment.end:
            return
        if self.segments and self.segments[-1].weights == segment.weights:
            self.segments[-1] = replace(self.segments[-1], end=segment.end)
        else:
            self.segments.append(segment)

    def finished(self, number: int) -> FinishedResponse:
        tokens = torch.tensor(self.tokens, dtype=torch.int64)
        logprobs = torch.tensor(self.logprobs, dtype=torch.float32)
        segments = tuple(self.segments)
        return FinishedResponse(
            number, tokens, logprobs, self.has_ended, segments, self.is_aborted, self.experts
        )


@dataclass
class Requests:
    """The requests for one response, each of which asks for the rest of it."""

    sampling: Sampling
    prompt: list[int]
    limit: int
    """Tokens of the whole response."""
    seed: int
    pieces: int = 0
    """Number of answers that the response consists of so far."""
    taken_at: int | None = None
    """The update of the weights after which it was last taken from a slow server."""

    def next(self, response: Response) -> ResponseRequest:
        routed = self.sampling.routed
        longest = len(self.prompt) + self.limit
        room = bytes_of_experts(longest, routed) if routed is not None else 0
        seed = stable_seed(self.seed, self.pieces) if self.pieces else self.seed
        return ResponseRequest(
            self.prompt + response.tokens,
            self.sampling.parameters,
            self.limit - len(response.tokens),
            seed,
            new_id(),
            room,
            self.taken_at,
        )
