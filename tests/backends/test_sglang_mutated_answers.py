"""Any answer of a server becomes a response or an error that names the server."""

import copy
import json
import random

import pytest

from rlcli.api.peer_json import parsed
from rlcli.backends._sglang_attach import Expected, check_logprobs, check_model
from rlcli.backends._sglang_http import ANSWER, Endpoint
from rlcli.backends._sglang_protocol import Sampling, largest_answer, read_answer, request_body
from rlcli.backends._sglang_response import Response
from rlcli.backends._sglang_server import Server
from rlcli.errors import ModelError, UsageError, WorkerError
from rlcli.testing.batches import DigitTokenizer

SAMPLING = Sampling({"temperature": 1.0}, frozenset({1}), tokens=9, ids=11)
BODY = request_body([2, 3], SAMPLING, 4, seed=1, rid="request")
TOKENS = [3, 4, 5, 1]
ANSWERED = {
    "text": "",
    "output_ids": TOKENS,
    "meta_info": {
        "id": "request",
        "finish_reason": {"type": "stop", "matched": 1},
        "weight_version": "run-1",
        "weight_versions": [
            {"version": "run-1", "start": 0, "end": 2},
            {"version": "run-2", "start": 2, "end": 4},
        ],
        "output_token_logprobs": [[-0.5, token, None] for token in TOKENS],
        "output_token_ids_logprobs": [[[-1.0 - token / 10, token, None] for token in range(11)]],
    },
}
HOSTILE = (
    None,
    True,
    False,
    0,
    -1,
    1,
    11,
    1 << 63,
    1 << 64,
    10**400,
    -(10**400),
    0.5,
    -0.5,
    float("nan"),
    float("inf"),
    float("-inf"),
    1e308,
    -1e308,
    "",
    "1",
    "run-",
    "run-" + "9" * 5000,
    "\ud800",
    "\u0660",
    "\x1b[2J",
    "x" * 5000,
    [],
    {},
    [[]],
    [{}],
    {"type": "stop"},
    {"": None},
    [None] * 50,
    json.loads("[" * 60 + "]" * 60),
    json.loads("[" * 150 + "]" * 150),
)


def paths_in(value, path=()):
    """The paths of all values in a value."""
    yield path
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield from paths_in(child, (*path, key))


def mutated(value, draw):
    """A copy with one or two changes."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 2))):
        path = draw.choice(list(paths_in(value)))
        if not path:
            return copy.deepcopy(draw.choice(HOSTILE))
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        action = draw.choice(("replace", "replace", "remove", "repeat"))
        if action == "replace":
            parent[path[-1]] = copy.deepcopy(draw.choice(HOSTILE))
        elif action == "remove":
            del parent[path[-1]]
        elif isinstance(parent, list):
            parent.insert(path[-1], copy.deepcopy(parent[path[-1]]))
    return value


def damaged(content, draw):
    """Bytes with some of them changed, removed or added."""
    position = draw.randrange(len(content))
    return (
        content[:position]
        + draw.randbytes(draw.choice((0, 1, 3)))
        + content[position + draw.choice((0, 1, 9)) :]
    )


def transported(value, draw, most):
    """A value as the client parses it, sometimes with damaged bytes."""
    content = json.dumps(value).encode()
    return parsed(damaged(content, draw) if draw.random() < 0.1 else content, most)


def version_number(label):
    if label not in ("run-1", "run-2"):
        raise WorkerError("of somebody else", code="F92")
    return int(label[-1])


@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_response_is_accepted_or_refused(seed):
    draw = random.Random(seed)
    endpoint, refused = Endpoint("http://127.0.0.1:1"), []
    for _ in range(1000):
        answer = mutated(ANSWERED, draw)
        try:
            raw = transported(answer, draw, largest_answer(BODY))
        except ValueError:
            continue
        try:
            response = Response(SAMPLING)
            response.add(read_answer(raw, BODY, SAMPLING, endpoint.hostile), version_number)
            response.finished(0)
        except WorkerError as error:
            refused.append(error.code)
    assert len(refused) > 200
    assert set(refused) <= {"F90", "F92"}


class MutatingEndpoint:
    """An endpoint with the answers of a valid server, one of which is mutated."""

    url = "http://127.0.0.1:1"

    def __init__(self, draw, target):
        self.draw, self.target, self.asked = draw, target, 0

    def get(self, path, seconds):
        return self._answered(
            {"/server_info": {"tp_size": 1}, "/model_info": {"weight_version": "run-1"}}[path]
        )

    def post(self, path, body, seconds, most=ANSWER):
        if path == "/tokenize":
            return self._answered(
                {"tokens": [list(DigitTokenizer()(text).input_ids) for text in body["prompt"]]}
            )
        answer = copy.deepcopy(ANSWERED) if path == "/generate" else {}
        if path == "/generate":
            answer["meta_info"]["id"] = body["rid"]
        return self._answered(answer, most)

    def _answered(self, answer, most=ANSWER):
        self.asked += 1
        if self.asked != self.target:
            return answer
        try:
            return transported(mutated(answer, self.draw), self.draw, most)
        except ValueError as problem:
            raise self.hostile(f"gives an answer {problem}") from None

    hostile = Endpoint.hostile


@pytest.mark.parametrize("seed", range(2))
def test_a_mutated_answer_about_the_model_is_accepted_or_refused(seed):
    draw = random.Random(seed)
    expected = Expected("actor", DigitTokenizer(), ids=11, ranks=1, seconds=1.0)
    for _ in range(300):
        server = Server(0, MutatingEndpoint(draw, target=draw.randrange(8)))
        server.endpoint.draw = draw
        for check in (check_model, check_logprobs):
            try:
                check(server, expected)
            except (ModelError, UsageError, WorkerError):
                break


def test_a_large_answer_is_refused_before_it_takes_memory():
    most = largest_answer(BODY)
    with pytest.raises(ValueError, match="values"):
        parsed(b"[" + b"{}," * (most.bytes // 4) + b"{}]", most)
    with pytest.raises(ValueError, match="bytes"):
        parsed(b" " * (most.bytes + 1), most)
    longer = request_body([2], SAMPLING, 4096, seed=1, rid="request")
    assert 64 * largest_answer(longer).bytes < 400 << 20, "sixty-four answers at once"
