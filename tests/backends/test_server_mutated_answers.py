"""Any answer of a server becomes a response or an error that names the server."""

import copy
import json
import random

import pytest
from server_kinds import KINDS

from rlcli.api.peer_json import parsed
from rlcli.backends._server_answers import Sampling, largest_answer, read_answer
from rlcli.backends._server_attach import Expected, check_logprobs, check_model
from rlcli.backends._server_dialect import ResponseRequest
from rlcli.backends._server_http import ANSWER, Endpoint
from rlcli.backends._server_process import Server
from rlcli.backends._server_response import Response
from rlcli.errors import ModelError, UsageError, WorkerError
from rlcli.testing.batches import DigitTokenizer

SAMPLING = Sampling({"temperature": 1.0}, frozenset({1}), tokens=9, ids=11)
REQUEST = ResponseRequest([2, 3], SAMPLING.parameters, 4, seed=1, id="request")
answered_by = pytest.mark.parametrize("kind", KINDS, ids=str)
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


@answered_by
@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_response_is_accepted_or_refused(kind, seed):
    draw = random.Random(seed)
    endpoint, refused = Endpoint("http://127.0.0.1:1"), []
    for _ in range(1000):
        answer = mutated(kind.answer, draw)
        try:
            raw = transported(answer, draw, largest_answer(4))
        except ValueError:
            continue
        try:
            answer = read_answer(kind.dialect, raw, REQUEST, SAMPLING, endpoint.hostile)
            response = Response(SAMPLING)
            response.add(answer, version_number)
            response.finished(0)
        except WorkerError as error:
            refused.append(error.code)
    assert len(refused) > 200
    assert set(refused) <= {"F90", "F92"}


class MutatingEndpoint:
    """An endpoint with the answers of a valid server, one of which is mutated."""

    url, hint = "http://127.0.0.1:1", None

    def __init__(self, kind, draw, target):
        self.kind, self.draw, self.target, self.asked = kind, draw, target, 0

    def get(self, path, seconds):
        return self._answered(copy.deepcopy(self.kind.facts[path]))

    def post(self, path, body, seconds, most=ANSWER):
        if path == "/tokenize":
            return self._answered({"tokens": self._tokens(body["prompt"])})
        if path != self.kind.generate:
            return self._answered({})
        answer = copy.deepcopy(self.kind.answer)
        if self.kind.name == "sglang":
            answer["meta_info"]["id"] = body["rid"]
        else:
            answer["request_id"] = f"generate-tokens-{body['request_id']}"
            ids = body["sampling_params"].get("logprob_token_ids", ())
            compared = [{"token_id": id_, "logprob": -1.0 - id_ / 10} for id_ in ids]
            content = answer["choices"][0]["logprobs"]["content"]
            answer["choices"][0]["logprobs"]["content"] = [{**content[0], "top_logprobs": compared}]
        return self._answered(answer, most)

    def _tokens(self, prompt):
        if isinstance(prompt, str):
            return list(DigitTokenizer()(prompt).input_ids)
        return [self._tokens(text) for text in prompt]

    def _answered(self, answer, most=ANSWER):
        self.asked += 1
        if self.asked != self.target:
            return answer
        try:
            return transported(mutated(answer, self.draw), self.draw, most)
        except ValueError as problem:
            raise self.hostile(f"gives an answer {problem}") from None

    hostile = Endpoint.hostile


@answered_by
@pytest.mark.parametrize("seed", range(2))
def test_a_mutated_answer_about_the_model_is_accepted_or_refused(kind, seed):
    draw = random.Random(seed)
    expected = Expected("actor", DigitTokenizer(), ids=11, ranks=1, seconds=1.0)
    ends = []
    for _ in range(300):
        endpoint = MutatingEndpoint(kind, draw, target=draw.randrange(8))
        server = Server(0, kind.dialect, endpoint)
        try:
            check_model(server, expected)
            check_logprobs(server, expected)
            ends.append("accepted")
        except (ModelError, UsageError, WorkerError) as error:
            ends.append(error.code)
    assert len(set(ends)) > 2


def test_a_large_answer_is_refused_before_it_takes_memory():
    most = largest_answer(4)
    with pytest.raises(ValueError, match="values"):
        parsed(b"[" + b"{}," * (most.bytes // 4) + b"{}]", most)
    with pytest.raises(ValueError, match="bytes"):
        parsed(b" " * (most.bytes + 1), most)
    assert 64 * largest_answer(4096).bytes < 400 << 20, "sixty-four answers at once"
