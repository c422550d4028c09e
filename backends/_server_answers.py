"""The checks that a server's answer must pass before it is used.

Log-probs are those of the whole distribution at the temperature (`Dialect.sampling_parameters`). If
a server stops at a token that does not end a response here, or has sampled an id that the tokenizer
does not have, the rest is requested again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.peer_json import Size
from rlcli.errors import RlcliError

from ._routing_replay import RoutedLayers
from ._server_dialect import Body, Dialect, ResponseRequest, ServerReply
from ._server_experts import read_experts

ROUNDING = 1e-3
"""How far above 0 a log-prob may be."""
PER_TOKEN = Size(1024, 32)
"""Size of a token's part of an answer: its id, its log-prob and, from a server that decodes,
its text."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled, and which ids exist."""

    parameters: Body
    ends: frozenset[int]
    """Tokens that end a response."""
    tokens: int
    """Ids from here on have no token: the embedding matrix is padded."""
    ids: int
    """Rows of the embedding matrix."""
    routed: RoutedLayers | None = None
    """The layers whose experts must be reported."""

    @classmethod
    def of(
        cls,
        dialect: Dialect,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        ids: int,
        tokens: int,
    ) -> Sampling:
        """Raises ModelError for settings under which the server's log-probs differ."""
        ends = frozenset({tokenizer.eos_token_id, *gconfig.stop_token_ids})
        return cls(dialect.sampling_parameters(gconfig, sorted(ends)), ends, tokens, ids)


@dataclass(frozen=True)
class Span:
    """Tokens of an answer that were sampled with the same weights."""

    label: str
    """The version that the server reports for them."""
    start: int
    end: int


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    spans: list[Span]
    is_aborted: bool
    experts: torch.Tensor | None = None
    """[tokens of request and answer but the last, L, k]; None if the server does not report them,
    or if nobody asked for them."""


def largest_answer(tokens: int, bytes_of_experts: int = 0) -> Size:
    """The largest answer to a request for `tokens` tokens."""
    length = (1 << 20) + tokens * PER_TOKEN.bytes + bytes_of_experts
    return Size(length, 20_000 + tokens * PER_TOKEN.separators)


def read_answer(
    dialect: Dialect,
    raw: Any,
    request: ResponseRequest,
    sampling: Sampling,
    hostile: Callable[[str], RlcliError],
) -> Answer:
    """Parse the answer to a request. Raises the error that `hostile` makes from a description of
    what is wrong with it."""
    try:
        return _checked(dialect.reply(raw), request, sampling)
    except (KeyError, TypeError, IndexError, AttributeError) as problem:
        raise hostile(f"gives an incomplete answer: {problem!r}") from None
    except ValueError as problem:
        raise hostile(f"gives an answer {problem}") from None


def demand_own(id_: Any, request_id: str) -> None:
    """Check that an answer belongs to the request. Raises ValueError."""
    if id_ != request_id:
        raise ValueError("to another request")


def is_logprob(value: Any) -> bool:
    """Whether a value is a finite number up to 0."""
    return type(value) in (int, float) and -sys.float_info.max <= value <= ROUNDING


def _checked(reply: ServerReply, request: ResponseRequest, sampling: Sampling) -> Answer:
    demand_own(reply.id, request.id)
    tokens, finish = reply.tokens, reply.finish
    if not isinstance(tokens, list) or not all(
        type(token) is int and 0 <= token < sampling.ids for token in tokens
    ):
        raise ValueError(f"with tokens that are not ids below {sampling.ids}")
    _check_end(finish, len(tokens), request.max_new_tokens)
    logprobs = _logprobs(reply, tokens)
    spans, experts = _spans(reply.versions, len(tokens)), None
    if sampling.routed is not None and reply.experts is not None:
        read = len(request.prompt) + len(tokens) - 1
        experts = read_experts(reply.experts, read, sampling.routed)
    return Answer(tokens, logprobs, spans, finish == "abort", experts)


def _check_end(finish: Any, count: int, requested: int) -> None:
    if finish not in ("stop", "length", "abort"):
        raise ValueError(f"that ended for an unknown reason: {str(finish)[:40]!r}")
    if (
        count > requested
        or (finish == "length" and count < requested)
        or (finish == "stop" and not count)
    ):
        raise ValueError(
            f"of {count} tokens that ended by {finish!r}, where {requested} were requested"
        )


def _logprobs(reply: ServerReply, tokens: list[int]) -> list[float]:
    logged = list(reply.logged)
    if [token for token, _ in logged] != tokens:
        raise ValueError(
            f"of {len(tokens)} tokens with log-probs of {len(logged)} tokens, or of different ones"
        )
    logprobs = [logprob for _, logprob in logged]
    if not all(map(is_logprob, logprobs)):
        raise ValueError("with log-probs that are not finite numbers up to 0")
    return [float(logprob) for logprob in logprobs]


def _spans(versions: Any, length: int) -> list[Span]:
    """The spans by version of the weights."""
    spans = [Span(span["version"], span["start"], span["end"]) for span in versions]
    if not all(
        type(span.label) is str and type(span.start) is type(span.end) is int for span in spans
    ):
        raise ValueError("whose spans of weight versions are not a name and two positions each")
    edges = [0, *(span.end for span in spans)]
    if length and (
        edges[:-1] != [span.start for span in spans]
        or edges[-1] != length
        or edges != sorted(edges)
    ):
        raise ValueError(f"whose spans of weight versions do not cover its {length} tokens")
    return spans if length else []
