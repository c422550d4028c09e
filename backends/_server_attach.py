"""Checks that an existing server fits the role: it must have the role's ids and tokens, and report
log-probs as the rest of the project defines them. A run that finds out later has trained on
something else until then."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlcli.api.http_request import ServerGone, ServerLate
from rlcli.api.peer_json import Size
from rlcli.errors import ModelError, RlcliError, UsageError, WorkerError

from ._server_answers import demand_own, is_logprob, largest_answer
from ._server_dialect import Body, ServerFacts
from ._server_http import ANSWER, Endpoint, ServerRefused
from ._server_process import Server
from ._server_weights import dtype_of

PROBES = (
    "Hello, world! 12 + 34 = 46.\n",
    "  two\tspaces\n\n",
    "naïve „Straße“ – 東京 😀",
    "def f(x):\n    return x ** 2",
)
"""Texts whose tokens are compared."""
SPREAD = 64
"""Ids, spread over the vocabulary, whose texts are probes too."""
SPREAD_OF_LOGPROBS = 16
"""Ids whose log-probs are compared: vLLM gives those of 20 unless told otherwise."""
LOWEST = -30.0
"""Log-probs below this are left out: at half the temperature, float32 would round their
probabilities to 0."""
SEEN = 0.01
"""Nats by which the log-probs of two tokens must differ to be conclusive."""
TOLERANCE = 0.25
"""Tolerance as a share of that difference: bfloat16 rounds, but not as much."""


@dataclass(frozen=True)
class Expected:
    """The properties that a server of the role's model must have."""

    role: str
    tokenizer: Any
    ids: int
    """Rows of the embedding matrix."""
    ranks: int
    """Number of processes that weights are sent to."""
    seconds: float
    """Time for a response. The first one may take long, because servers compile kernels at their
    first use."""


def check_model(server: Server, expected: Expected) -> None:
    """Raises ModelError for a server of another model, UsageError for another number of processes,
    WorkerError if the server cannot be asked."""
    for path, body in server.dialect.recover():
        _ask(server, partial(_post, path=path, body=body, seconds=server.patience))
    facts = _facts(server)
    _check_processes(server, expected, facts.processes)
    _check_settings(server, facts)
    if facts.has_tokenizer and callable(expected.tokenizer):
        _check_tokens(server, expected)
    _check_ids(server, expected)


def held_dtype(servers: Sequence[Server], configuration: Any) -> torch.dtype:
    """The dtype in which all servers hold a model with this configuration, as they report it;
    float32 if they differ. Raises WorkerError if one cannot be asked."""
    dtypes = {dtype_of({"dtype": _facts(server).dtype}, configuration) for server in servers}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def check_logprobs(server: Server, expected: Expected) -> None:
    """Log-probs must be those of the distribution at the temperature. For any model, two tokens'
    log-probs then differ twice as much at half the temperature; those of the distribution without
    the temperature differ as before.

    Raises ModelError; WorkerError if the server cannot be asked.
    """
    ids = _spread(expected.ids, SPREAD_OF_LOGPROBS)
    as_it_is, halved = (_logprobs(server, expected, ids, temperature) for temperature in (1.0, 0.5))
    clear = [place for place, logprob in enumerate(as_it_is) if logprob > LOWEST]
    if not clear:
        return
    low, high = min(clear, key=as_it_is.__getitem__), max(clear, key=as_it_is.__getitem__)
    difference, at_half = as_it_is[high] - as_it_is[low], halved[high] - halved[low]
    if difference > SEEN and abs(at_half - 2 * difference) > TOLERANCE * difference:
        message = (
            f"{server.name} reports log-probs of a distribution other than the one that it samples "
            f"from: tokens {ids[low]} and {ids[high]} differ by {difference:.3g} at temperature 1 "
            f"and by {at_half:.3g} at 0.5"
        )
        raise ModelError(
            message, hint="start it without SGLANG_RETURN_ORIGINAL_LOGPROB", code="F93"
        )


def _facts(server: Server) -> ServerFacts:
    """Raises WorkerError."""
    try:
        return _ask(server, lambda endpoint: server.dialect.facts(endpoint, server.patience))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError):
        raise server.endpoint.hostile("does not describe itself") from None


def _ask(server: Server, ask: Callable[[Endpoint], Any]) -> Any:
    """Send a request. Raises WorkerError."""
    try:
        return ask(server.endpoint)
    except ServerRefused as problem:
        if problem.status in (401, 403):
            hint = "api_key_env names the variable that has its key"
            raise WorkerError(f"{server.name} rejects the API key", hint=hint, code="F91") from None
        raise server.endpoint.hostile(f"refuses a question about its model: {problem}") from None
    except (ServerGone, ServerLate) as problem:
        raise server.failure(f"could not be asked about its model: {problem}") from None


def _check_processes(server: Server, expected: Expected, count: Any) -> None:
    if isinstance(count, int) and count != expected.ranks:
        message = (
            f"{server.name} is {count} processes (its tp-size), and role {expected.role} "
            f"expects {expected.ranks}"
        )
        hint = f"models.{expected.role}.backend.args.tp={count}"
        raise UsageError(message, hint=hint, code="R49")


def _check_settings(server: Server, facts: ServerFacts) -> None:
    """The server's preferences apply to every parameter that a request does not set."""
    if facts.own_sampling:
        message = (
            f"{server.name} changes every distribution by sampling settings of its own: "
            f"{', '.join(facts.own_sampling)[:200]}"
        )
        raise ModelError(message, hint="start it without --preferred-sampling-params", code="F93")
    if facts.unsuitable is not None:
        problem, remedy = facts.unsuitable
        raise ModelError(f"{server.name} {problem}", hint=remedy, code="F93")


def _check_tokens(server: Server, expected: Expected) -> None:
    texts = [
        *PROBES,
        *(str(expected.tokenizer.decode([one])) for one in _spread(len(expected.tokenizer))),
    ]
    answers = [
        _ask(server, partial(_post, path=path, body=body, seconds=server.patience))
        for path, body in server.dialect.tokens_request(texts)
    ]
    try:
        theirs = server.dialect.read_tokens(answers)
    except (KeyError, TypeError, ValueError):
        theirs = []
    if len(theirs) != len(texts):
        raise server.endpoint.hostile("does not give the tokens of texts")
    ours = expected.tokenizer(texts, add_special_tokens=False).input_ids
    for text, our_ids, their_ids in zip(texts, ours, theirs, strict=True):
        if list(our_ids) != their_ids:
            message = (
                f"the tokens of {text!r} are {str(their_ids)[:80]} there and "
                f"{str(list(our_ids))[:80]} here"
            )
            raise _another(server, expected, message)


def _check_ids(server: Server, expected: Expected) -> None:
    """A bias of 0 has no effect, and is refused for an id that does not exist."""
    if (refusal := _refusal(server, expected, expected.ids - 1)) is not None:
        raise _another(
            server,
            expected,
            f"its vocabulary is smaller than the {expected.ids} ids here ({refusal})",
        )
    if _refusal(server, expected, expected.ids) is None:
        raise _another(
            server, expected, f"its vocabulary is larger than the {expected.ids} ids here"
        )


def _refusal(server: Server, expected: Expected, id_: int) -> str | None:
    """The refusal of a request with an id; None if the server takes it."""
    body = server.dialect.bias_body(id_, uuid.uuid4().hex)
    try:
        server.endpoint.post(server.dialect.GENERATE, body, expected.seconds)
    except ServerRefused as problem:
        if problem.status == 400:
            return str(problem)
        raise server.endpoint.hostile(f"refuses a question about its model: {problem}") from None
    except (ServerGone, ServerLate) as problem:
        raise server.failure(f"could not be asked about its model: {problem}") from None
    return None


def _another(server: Server, expected: Expected, difference: str) -> RlcliError:
    hint = "start it with the role's model, or name another server"
    message = f"{server.name} has another model than role {expected.role}: {difference}"
    return ModelError(message, hint=hint, code="F32")


def _spread(count: int, most: int = SPREAD) -> list[int]:
    """At most `most` numbers below `count`, evenly spread from the first to the last."""
    several = min(most, count)
    return sorted({place * (count - 1) // max(1, several - 1) for place in range(several)})


def _logprobs(
    server: Server, expected: Expected, ids: list[int], temperature: float
) -> list[float]:
    """Log-probs of tokens after the text of id 0."""
    id_ = uuid.uuid4().hex
    body = server.dialect.logprobs_body(ids, temperature, id_)
    answer = _ask(
        server,
        partial(
            _post,
            path=server.dialect.GENERATE,
            body=body,
            seconds=expected.seconds,
            most=largest_answer(1),
        ),
    )
    try:
        its_id, by_token = server.dialect.read_logprobs(answer)
        demand_own(its_id, id_)
        logprobs = [by_token[token] for token in ids]
    except (KeyError, TypeError, ValueError, IndexError) as problem:
        raise server.endpoint.hostile(
            f"does not give the log-probs of tokens: {problem!r}"
        ) from None
    if not all(is_logprob(one) or one == -math.inf for one in logprobs):
        raise server.endpoint.hostile("gives log-probs that are not numbers up to 0")
    return [float(one) for one in logprobs]


def _post(endpoint: Endpoint, *, path: str, body: Body, seconds: float, most: Size = ANSWER) -> Any:
    return endpoint.post(path, body, seconds, most)
