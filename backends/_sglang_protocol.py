"""Requests for responses in SGLang's protocol, and the checks that an answer must pass.

Log-probs are those of the whole distribution at the temperature. The server reports these unless
something is removed from the distribution before it computes them, so neither bans nor biases are
sent: if the server stops at a token that does not end a response here, or has sampled an id that
the tokenizer does not have, the rest is requested again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.peer_json import Size
from rlcli.errors import ModelError, RlcliError

ROUNDING = 1e-3
"""How far above 0 a log-prob may be."""
ALMOST_NOTHING = 1e-10
"""A top_p that leaves only the most likely token."""
PER_TOKEN = Size(1024, 32)
"""Size of a token's part of an answer: its id, its log-prob and, from a server that decodes,
its text."""
SENT = frozenset(
    {"temperature", "top_p", "top_k", "stop_token_ids", "max_new_tokens", "sampling_seed"}
)
"""The sampling parameters that every request has."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled, and which ids exist."""

    parameters: dict[str, Any]
    ends: frozenset[int]
    """Tokens that end a response."""
    tokens: int
    """Ids from here on have no token: the embedding matrix is padded."""
    ids: int
    """Rows of the embedding matrix."""

    @classmethod
    def of(
        cls, gconfig: GenerationHyperparameters, tokenizer: Any, ids: int, tokens: int
    ) -> Sampling:
        """Raises ModelError for settings under which the server's log-probs differ."""
        if gconfig.min_new_tokens:
            message = (
                "a server of sglang reports other log-probs while it keeps a response from "
                "ending (min_new_tokens)"
            )
            raise ModelError(message, hint="set generation.min_new_tokens=0", code="F93")
        ends = frozenset({tokenizer.eos_token_id, *gconfig.stop_token_ids})
        top_k, top_p = gconfig.top_k or -1, gconfig.top_p
        if gconfig.greedy or top_k == 1:  # its own greedy mode omits the temperature from log-probs
            top_k, top_p = -1, ALMOST_NOTHING
        parameters = {
            "temperature": gconfig.temperature,
            "top_p": top_p,
            "top_k": top_k,
            "stop_token_ids": sorted(ends),
        }
        return cls(parameters, ends, tokens, ids)


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


def request_body(
    prompt: Sequence[int], sampling: Sampling, new_tokens: int, seed: int, rid: str
) -> dict[str, Any]:
    parameters = {**sampling.parameters, "max_new_tokens": new_tokens, "sampling_seed": seed}
    return {
        "input_ids": list(prompt),
        "rid": rid,
        "sampling_params": parameters,
        "return_logprob": True,
    }


def largest_answer(body: Mapping[str, Any]) -> Size:
    """The largest answer to a request, in proportion to the tokens that it asks for."""
    tokens = body["sampling_params"]["max_new_tokens"]
    return Size((1 << 20) + tokens * PER_TOKEN.bytes, 20_000 + tokens * PER_TOKEN.separators)


def read_answer(
    raw: Any, body: Mapping[str, Any], sampling: Sampling, hostile: Callable[[str], RlcliError]
) -> Answer:
    """Parse the answer to a request. Raises the error that `hostile` makes from a description of
    what is wrong with it."""
    try:
        return _answer(raw, body, sampling)
    except (KeyError, TypeError, IndexError, AttributeError) as problem:
        raise hostile(f"gives an answer without what belongs to it: {problem!r}") from None
    except ValueError as problem:
        raise hostile(f"gives an answer {problem}") from None


def demand_own(meta: Any, body: Mapping[str, Any]) -> None:
    """Check that an answer belongs to the request. Raises ValueError."""
    if meta["id"] != body["rid"]:
        raise ValueError("to another request")


def is_logprob(value: Any) -> bool:
    """Whether a value is a finite number up to 0."""
    return type(value) in (int, float) and -sys.float_info.max <= value <= ROUNDING


def _answer(raw: Any, body: Mapping[str, Any], sampling: Sampling) -> Answer:
    meta, tokens, new_tokens = (
        raw["meta_info"],
        raw["output_ids"],
        body["sampling_params"]["max_new_tokens"],
    )
    demand_own(meta, body)
    finish = meta["finish_reason"]["type"]
    if not isinstance(tokens, list) or not all(
        type(token) is int and 0 <= token < sampling.ids for token in tokens
    ):
        raise ValueError(f"with tokens that are no ids below {sampling.ids}")
    if finish not in ("stop", "length", "abort"):
        raise ValueError(f"that ended for an unknown reason: {str(finish)[:40]!r}")
    if (
        len(tokens) > new_tokens
        or (finish == "length" and len(tokens) < new_tokens)
        or (finish == "stop" and not tokens)
    ):
        raise ValueError(
            f"of {len(tokens)} tokens that ended by {finish!r}, where {new_tokens} were asked for"
        )
    logged = meta["output_token_logprobs"]
    if len(logged) != len(tokens) or any(
        one[1] != token for one, token in zip(logged, tokens, strict=True)
    ):
        raise ValueError(
            f"of {len(tokens)} tokens with log-probs of {len(logged)} tokens, or of other ones"
        )
    logprobs = [one[0] for one in logged]
    if not all(map(is_logprob, logprobs)):
        raise ValueError("with log-probs that are no finite numbers up to 0")
    return Answer(
        tokens, [float(one) for one in logprobs], _spans(meta, len(tokens)), finish == "abort"
    )


def _spans(meta: dict[str, Any], length: int) -> list[Span]:
    """The spans by version of the weights; older servers only report the last version."""
    versions = meta.get("weight_versions")
    if versions is None:
        versions = [{"version": meta["weight_version"], "start": 0, "end": length}]
    spans = [Span(one["version"], one["start"], one["end"]) for one in versions]
    if not all(
        type(span.label) is str and type(span.start) is type(span.end) is int for span in spans
    ):
        raise ValueError("whose versions of weights are not a name with two places")
    edges = [0, *(span.end for span in spans)]
    if length and (
        edges[:-1] != [span.start for span in spans]
        or edges[-1] != length
        or edges != sorted(edges)
    ):
        raise ValueError(f"whose versions of weights do not add up to its {length} tokens")
    return spans if length else []
