"""Checks that an existing server fits the role: it must have the role's ids and tokens, and report
log-probs as the rest of the project defines them. A run that finds out later has trained on
something else until then."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlcli.errors import ModelError, RlcliError, UsageError, WorkerError

from ._sglang_http import Endpoint, ServerGone, ServerLate, ServerRefused
from ._sglang_protocol import SENT, demand_own, is_logprob, largest_answer
from ._sglang_server import Server
from ._sglang_weights import dtype_of

PROBES = (
    "Hello, world! 12 + 34 = 46.\n",
    "  two\tspaces\n\n",
    "naïve „Straße“ – 東京 😀",
    "def f(x):\n    return x ** 2",
)
"""Texts whose tokens are compared."""
SPREAD = 64
"""Ids, spread over the vocabulary, whose texts are probes too, and whose log-probs are compared."""
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
    """Time for a response. The first one may take long: the server compiles what it has not
    compiled before."""


def check_model(server: Server, expected: Expected) -> None:
    """Raises ModelError for a server of another model, UsageError for another number of processes,
    WorkerError if the server cannot be asked."""
    # an earlier run may have paused it
    _ask(server, lambda at: at.post("/continue_generation", {}, server.patience))
    info = _server_info(server)
    model = _ask(server, lambda at: at.get("/model_info", server.patience))
    if not isinstance(model, dict):
        raise server.endpoint.hostile("does not describe its model")
    _check_processes(server, expected, info.get("tp_size"))
    _check_settings(server, model.get("preferred_sampling_params"))
    if not info.get("skip_tokenizer_init") and callable(expected.tokenizer):
        _check_tokens(server, expected)
    _check_ids(server, expected)


def held_dtype(servers: Sequence[Server], configuration: Any) -> torch.dtype:
    """The dtype in which all servers hold a model with this configuration, as they report it;
    float32 if they differ. Raises WorkerError if one cannot be asked."""
    dtypes = {dtype_of(_server_info(server), configuration) for server in servers}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def check_logprobs(server: Server, expected: Expected) -> None:
    """Log-probs must be those of the distribution at the temperature. For any model, two tokens'
    log-probs then differ twice as much at half the temperature; those of the distribution without
    the temperature differ as before.

    Raises ModelError; WorkerError if the server cannot be asked.
    """
    ids = _spread(expected.ids)
    as_it_is, halved = (_logprobs(server, expected, ids, temperature) for temperature in (1.0, 0.5))
    clear = [place for place, logprob in enumerate(as_it_is) if logprob > LOWEST]
    if not clear:
        return
    low, high = min(clear, key=as_it_is.__getitem__), max(clear, key=as_it_is.__getitem__)
    difference, at_half = as_it_is[high] - as_it_is[low], halved[high] - halved[low]
    if difference > SEEN and abs(at_half - 2 * difference) > TOLERANCE * difference:
        message = (
            f"{server.name} reports log-probs of another distribution than the one that it samples "
            f"from: tokens {ids[low]} and {ids[high]} differ by {difference:.3g} at temperature 1 "
            f"and by {at_half:.3g} at 0.5"
        )
        raise ModelError(
            message, hint="start it without SGLANG_RETURN_ORIGINAL_LOGPROB", code="F93"
        )


def _server_info(server: Server) -> dict[str, Any]:
    """The settings that it was started with. Raises WorkerError."""
    info = _ask(server, lambda at: at.get("/server_info", server.patience))
    if not isinstance(info, dict):
        raise server.endpoint.hostile("does not describe itself")
    return info


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


def _check_settings(server: Server, preferred: Any) -> None:
    """The server's preferences apply to every parameter that a request does not set."""
    others = (
        sorted(set(preferred) - SENT)
        if isinstance(preferred, dict)
        else [str(preferred)]
        if preferred
        else []
    )
    if others:
        message = (
            f"{server.name} changes every distribution by sampling settings of its own: "
            f"{', '.join(others)[:200]}"
        )
        raise ModelError(message, hint="start it without --preferred-sampling-params", code="F93")


def _check_tokens(server: Server, expected: Expected) -> None:
    texts = [
        *PROBES,
        *(str(expected.tokenizer.decode([one])) for one in _spread(len(expected.tokenizer))),
    ]
    body = {"prompt": texts, "add_special_tokens": False}
    answer = _ask(server, lambda at: at.post("/tokenize", body, server.patience))
    theirs = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(theirs, list) or len(theirs) != len(texts):
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
    parameters = {"max_new_tokens": 1, "temperature": 1.0, "logit_bias": {str(id_): 0.0}}
    body = {"input_ids": [0], "rid": uuid.uuid4().hex, "sampling_params": parameters}
    try:
        server.endpoint.post("/generate", body, expected.seconds)
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


def _spread(count: int) -> list[int]:
    """Numbers below `count`, evenly spread from the first to the last."""
    several = min(SPREAD, count)
    return sorted({place * (count - 1) // max(1, several - 1) for place in range(several)})


def _logprobs(
    server: Server, expected: Expected, ids: list[int], temperature: float
) -> list[float]:
    """Log-probs of tokens after the text of id 0."""
    body = {
        "input_ids": [0],
        "rid": uuid.uuid4().hex,
        "return_logprob": True,
        "token_ids_logprob": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
    }
    answer = _ask(
        server, lambda at: at.post("/generate", body, expected.seconds, largest_answer(body))
    )
    try:
        demand_own(answer["meta_info"], body)
        (logged,) = answer["meta_info"]["output_token_ids_logprobs"]
        by_token = {token: logprob for logprob, token, *_ in logged}
        logprobs = [by_token[one] for one in ids]
    except (KeyError, TypeError, ValueError, IndexError) as problem:
        raise server.endpoint.hostile(
            f"does not give the log-probs of tokens: {problem!r}"
        ) from None
    if not all(is_logprob(one) or one == -math.inf for one in logprobs):
        raise server.endpoint.hostile("gives log-probs that are not numbers up to 0")
    return [float(one) for one in logprobs]
