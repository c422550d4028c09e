"""Messages of the control plane: what is understood, and that nothing else is."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli import errors
from rlcli.messaging.messages import Failure, ProtocolError, Reply, Report, Request, pack, unpack

TOKEN = b"t" * 32


@pytest.mark.parametrize(
    "message",
    [
        Request(1, "run_call", {"ids": ["a"], "nested": {"x": [1.5, None, True, "ü"]}}),
        Reply(7, 1, {"loss": 0.1}),
        Reply(7, 1, {"state": {"counter": 2**128 - 1, "debt": -(2**70)}, "by_number": {3: "c"}}),
        Report(1, "checkpoint_written", {"step": 4, "files": []}),
        Report(
            0,
            "checkpoint_written",
            {},
            Failure("ResourceError", "what", "F28", None, None, "trace"),
        ),
        Reply(7, 0, failure=Failure("DataError", "what", "F31", "a.jsonl:3", None, "trace")),
    ],
)
def test_a_message_is_equal_after_packing_and_unpacking(message):
    assert unpack([pack(message, TOKEN)], TOKEN, type(message)) == message


def test_a_value_that_no_message_can_hold_is_named():
    with pytest.raises(TypeError, match=r"a set cannot be sent in a message: \{1\}"):
        pack(Reply(7, 1, {"ids": {1}}), TOKEN)


def test_a_message_with_another_token_is_refused():
    with pytest.raises(ProtocolError, match="token"):
        unpack([pack(Request(1, "save"), b"x" * 32)], TOKEN, Request)


def test_a_reply_is_refused_where_a_request_is_expected():
    with pytest.raises(ProtocolError):
        unpack([pack(Reply(1, 0), TOKEN)], TOKEN, Request)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
FIELDS = st.sampled_from(
    ["number", "op", "args", "rank", "name", "value", "failure", "kind", "more"]
)


@given(frame=st.binary(max_size=200))
def test_garbage_raises_a_protocol_error_and_no_other(frame):
    for cls in (Request, Reply, Report):
        with pytest.raises(ProtocolError):
            unpack([frame], TOKEN, cls)


@given(fields=st.dictionaries(FIELDS, VALUES), cls=st.sampled_from([Request, Reply, Report]))
def test_well_formed_msgpack_with_the_token_is_checked_as_well(fields, cls):
    frame = msgpack.packb({**fields, "kind": cls.__name__.lower(), "token": TOKEN}, default=str)
    try:
        message = unpack([frame], TOKEN, cls)
    except ProtocolError:
        return
    assert pack(message, TOKEN)
    assert cls is Report or type(message.number) is int


def test_a_message_that_is_too_long_is_refused_before_it_is_parsed():
    with pytest.raises(ProtocolError, match="at most 50 are read"):
        unpack([pack(Request(1, "x" * 100), TOKEN)], TOKEN, Request, most=50)


@pytest.mark.parametrize(
    "name",
    ["ProjectError", "DataError", "ModelError", "ResourceError", "WorkerError", "NumericError"],
)
def test_an_error_has_the_same_class_after_it_was_sent(name):
    error = getattr(errors, name)("what", where="here", hint="do", code="F99")
    failure = Failure.of(error, "rank 1 pid 5")
    arrived = unpack([pack(Reply(1, 1, failure=failure), TOKEN)], TOKEN, Reply).failure.as_error()
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)


def test_a_failure_can_only_name_an_error_of_rlcli():
    assert type(Failure("Exception", "w", "c", None, None, "").as_error()) is errors.RlcliError
    assert type(Failure("render", "w", "c", None, None, "").as_error()) is errors.RlcliError
