"""Experts that a server reports: any text becomes experts of the right form, or is refused."""

import base64
import io
import random
from contextlib import ExitStack

import numpy
import pytest
import torch
from attached_engines import Attached
from server_kinds import SGLANG, VLLM

from rlcli.backends._routing_replay import RoutedLayers
from rlcli.backends._server_answers import Answer, Sampling, Span, largest_answer
from rlcli.backends._server_experts import bytes_of_experts, read_experts
from rlcli.backends._server_response import Response
from rlcli.errors import ModelError, WorkerError
from rlcli.testing.backend.generation import generate

ROUTED = RoutedLayers(indices=(1, 3), layers=4, experts=300, per_token=2)
TOKENS = 5
EXPERTS = numpy.arange(TOKENS * 4 * 2).reshape(TOKENS, 4, 2) * 7


def encoded(array):
    file = io.BytesIO()
    numpy.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("dtype", ["uint16", "int16", "int32"])
def test_layers_without_experts_are_left_out(dtype):
    expected = torch.from_numpy(EXPERTS[:, [1, 3]]).to(torch.int16)
    for array in (EXPERTS, EXPERTS[:, [1, 3]]):
        experts = read_experts(encoded(array.astype(dtype)), TOKENS, ROUTED)
        assert experts.dtype == torch.int16
        assert torch.equal(experts, expected)


def test_numbers_alone_are_read_too():
    expected = torch.from_numpy(EXPERTS[:, [1, 3]]).to(torch.int16)
    for array in (EXPERTS, EXPERTS[:, [1, 3]]):
        text = base64.b64encode(array.astype("<i4").tobytes()).decode()
        assert torch.equal(read_experts(text, TOKENS, ROUTED), expected)
        assert len(text) < bytes_of_experts(TOKENS, ROUTED)


def test_few_experts_take_a_byte():
    few = RoutedLayers(indices=(0,), layers=1, experts=256, per_token=1)
    array = numpy.full((TOKENS, 1, 1), 255, dtype="uint8")
    assert read_experts(encoded(array), TOKENS, few).dtype == torch.uint8


WHOLE = encoded(EXPERTS.astype("int32"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (7, "not a text"),
        ([WHOLE], "not a text"),
        ("%%%", "."),
        ("\ud800", "."),
        ("", "neither a NumPy file of whole numbers nor int32"),
        (encoded(EXPERTS.astype("float32")), "neither a NumPy file of whole numbers"),
        (encoded(EXPERTS.astype("U4")), "neither a NumPy file of whole numbers"),
        (
            encoded(numpy.asfortranarray(EXPERTS.astype("int32"))),
            "neither a NumPy file of whole numbers",
        ),
        (
            encoded(EXPERTS.astype("int32").reshape(TOKENS, -1)),
            "neither a NumPy file of whole numbers",
        ),
        (encoded(EXPERTS[1:].astype("int32")), r"shape \(4, 4, 2\) where \(5, 2, 2\) was expected"),
        (encoded(EXPERTS[:, :3].astype("int32")), "shape"),
        (encoded((EXPERTS + 100).astype("int32")), "not numbers below 300"),
        (encoded((-EXPERTS).astype("int32")), "not numbers below 300"),
        (WHOLE[: len(WHOLE) - 8], "cut off"),
    ],
)
def test_anything_else_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        read_experts(text, TOKENS, ROUTED)


def test_a_shape_that_would_fill_the_memory_is_refused():
    content = base64.b64decode(WHOLE).replace(b"(5, 4, 2)", b"(999999999, 4, 2)")
    with pytest.raises(ValueError, match="shape"):
        read_experts(base64.b64encode(content).decode(), TOKENS, ROUTED)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_experts_are_accepted_or_refused(seed):
    draw, refused, content = random.Random(seed), 0, base64.b64decode(WHOLE)
    for _ in range(500):
        position = draw.randrange(len(content))
        damaged = content[:position] + draw.randbytes(2) + content[position + draw.choice((0, 2)) :]
        try:
            experts = read_experts(base64.b64encode(damaged).decode(), TOKENS, ROUTED)
        except ValueError:
            refused += 1
        else:
            assert experts.shape == (TOKENS, 2, 2)
            assert 0 <= int(experts.min()) <= int(experts.max()) < 300
    assert refused > 100


def test_there_is_room_for_experts_in_an_answer():
    text = encoded(numpy.zeros((9000, 4, 2), dtype="int32"))
    assert len(text) < largest_answer(1, bytes_of_experts(9000, ROUTED)).bytes
    assert largest_answer(1).bytes + bytes_of_experts(9000, ROUTED) < 3 << 20


def test_the_rest_of_a_response_brings_the_experts_of_all_tokens():
    """A server that is requested to continue reads the whole text again."""
    sampling = Sampling({}, frozenset({1}), tokens=9, ids=11, routed=ROUTED)
    response = Response(sampling)
    first, rest = (torch.full((rows, 2, 2), rows, dtype=torch.int16) for rows in (5, 7))
    # the id 10 has no token: it is drawn again
    response.add(Answer([2, 3, 10], [-1.0] * 3, [Span("a", 0, 3)], False, first), lambda _: 0)
    assert torch.equal(response.experts, first[:4])
    response.add(Answer([4, 5, 1], [-1.0] * 3, [Span("a", 0, 3)], False, rest), lambda _: 0)
    assert torch.equal(response.finished(0).routed_experts, rest)


@pytest.fixture(params=[VLLM, SGLANG], ids=lambda kind: kind.name)
def attached(request, tmp_path):
    checks = Attached()
    checks.server_kind, checks.name, checks.update = request.param, request.param.name, "disk"
    checks.tmp_path, checks.fakes = tmp_path, []
    with ExitStack() as checks.stack:
        yield checks


def test_a_server_that_was_started_without_the_option_is_refused(attached):
    engine = attached.engine("mixtral")
    attached.fakes[0].returns_experts = False
    generate(engine)
    with pytest.raises(ModelError, match="does not report the experts") as refused:
        generate(engine, routing_replay=True)
    assert refused.value.code == "F93"
    assert "options.enable_return_routed_experts=true" in refused.value.hint


def test_a_server_that_reports_experts_of_fewer_tokens_is_refused(attached):
    engine = attached.engine("mixtral")

    def without_prompt(answer):
        if attached.server_kind is SGLANG:
            of_response = bytes(4 * len(answer["output_ids"]) * 2 * 2)
            answer["meta_info"]["routed_experts"] = base64.b64encode(of_response).decode()
        else:
            (choice,) = answer["choices"]
            of_response = numpy.zeros((len(choice["token_ids"]), 2, 2), "uint8")
            choice["routed_experts"] = encoded(of_response)
        return answer

    attached.fakes[0].spoil = without_prompt
    with pytest.raises(WorkerError, match=r"experts (of|that are neither .* int32 of) shape"):
        generate(engine, routing_replay=True)
