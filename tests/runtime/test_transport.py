"""The control plane: who may speak, what is understood, and what happens when nobody answers."""

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlcli import errors
from rlcli.launch.meeting import MeetingFolder
from rlcli.runtime import control, messages, own_pauses, transport
from rlcli.runtime.control import Control
from rlcli.runtime.messages import Failure, ProtocolError, Reply, Report, Request, pack, unpack
from rlcli.runtime.requests import Requests
from rlcli.runtime.transport import HELLO, InlineTransport, ZmqMaster, ZmqWorker

TOKEN = b"t" * 32


# -- messages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [
    Request(1, "run_call", {"ids": ["a"], "nested": {"x": [1.5, None, True, "ü"]}}),
    Reply(7, 1, {"loss": 0.1}),
    Report(1, "checkpoint_written", {"step": 4, "files": []}),
    Report(0, "checkpoint_written", {}, Failure("ResourceError", "what", "F28", None, None, "trace")),
    Reply(7, 0, failure=Failure("DataError", "what", "F31", "a.jsonl:3", None, "trace")),
])  # fmt: skip
def test_a_message_survives_the_wire(message):
    assert unpack(pack(message, TOKEN), TOKEN, type(message)) == message


def test_another_token_is_refused():
    with pytest.raises(ProtocolError, match="token"):
        unpack(pack(Request(1, "save"), b"x" * 32), TOKEN, Request)


def test_a_reply_is_no_request():
    with pytest.raises(ProtocolError):
        unpack(pack(Reply(1, 0), TOKEN), TOKEN, Request)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20,
)  # fmt: skip
FIELDS = st.sampled_from(["number", "op", "args", "rank", "name", "value", "failure", "kind", "more"])


@given(frame=st.binary(max_size=200))
def test_garbage_is_an_error_of_the_protocol_and_nothing_else(frame):
    for cls in (Request, Reply, Report):
        with pytest.raises(ProtocolError):
            unpack(frame, TOKEN, cls)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # of a busy machine it says nothing
@given(fields=st.dictionaries(FIELDS, VALUES), cls=st.sampled_from([Request, Reply, Report]))
def test_well_formed_msgpack_with_the_token_is_checked_as_well(fields, cls):
    frame = msgpack.packb({**fields, "kind": cls.__name__.lower(), "token": TOKEN}, default=str)
    try:
        message = unpack(frame, TOKEN, cls)
    except ProtocolError:
        return
    assert pack(message, TOKEN)
    assert cls is Report or type(message.number) is int


def test_a_long_message_is_not_even_parsed(monkeypatch):
    monkeypatch.setattr(messages, "LARGEST", 50)
    with pytest.raises(ProtocolError, match="bytes"):
        unpack(pack(Request(1, "x" * 100), TOKEN), TOKEN, Request)


@pytest.mark.parametrize(
    "name", ["ProjectError", "DataError", "ModelError", "ResourceError", "WorkerError", "NumericError"]
)
def test_an_error_keeps_its_class_on_the_way(name):
    error = getattr(errors, name)("what", where="here", hint="do", code="F99")
    failure = Failure.of(error, "rank 1 pid 5", "")
    arrived = unpack(pack(Reply(1, 1, failure=failure), TOKEN), TOKEN, Reply).failure.as_error()
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)


def test_a_failure_cannot_name_any_other_class():
    assert type(Failure("Exception", "w", "c", None, None, "").as_error()) is errors.RlcliError
    assert type(Failure("render", "w", "c", None, None, "").as_error()) is errors.RlcliError


# -- sockets -------------------------------------------------------------------------------------------------


class Ranks:
    """A master, and workers that are threads of this process."""

    def __init__(self, size=1):
        self.meeting = MeetingFolder()
        self.folder = self.meeting.path
        self.dead = None
        self.master = ZmqMaster(self.folder, size, self.check)
        self.threads = []

    def check(self):
        if self.dead:
            raise errors.WorkerError(self.dead)

    def start(self, rank, handle):
        def work():
            link = ZmqWorker(self.folder, rank)
            link.serve(handle, lambda error: Failure.of(error, f"rank {rank}", ""))
            link.close()

        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()

    def stranger(self):
        """A socket that knows address and key, and not the token."""
        socket = Control.read(self.folder).connect(zmq.Context.instance())
        socket.linger = 0
        return socket

    def close(self):
        for rank in self.master.pids:
            self.master.send(rank, Request(99, "shutdown"))
        for thread in self.threads:
            thread.join(5)
        self.master.close()
        self.meeting.close()


@pytest.fixture
def ranks():
    made = Ranks()
    yield made
    made.close()


def echo(request):
    return {"op": request.op, **request.args}


def test_questions_reach_the_worker_and_answers_the_master(ranks):
    ranks.start(0, echo)
    ranks.master.wait_for_workers(10)
    ranks.master.send(0, Request(1, "first", {"x": 1}))
    ranks.master.send(0, Request(2, "second"))
    assert ranks.master.receive(10, "answers") == Reply(1, 0, {"op": "first", "x": 1})
    assert ranks.master.receive(10, "answers") == Reply(2, 0, {"op": "second"})


def test_the_master_listens_in_a_folder_for_its_owner_alone(ranks):
    address = ranks.master._socket.getsockopt_string(zmq.LAST_ENDPOINT)
    assert Path(address.removeprefix("ipc://")).parent == ranks.folder
    assert stat.S_IMODE(ranks.folder.stat().st_mode) == 0o700


def test_what_opens_the_socket_is_for_the_owner_alone(ranks):
    file = ranks.folder / control.CONTROL_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(Control.read(ranks.folder).token) == 32


def test_the_control_file_goes_with_the_master(ranks):
    ranks.master.close()
    assert not (ranks.folder / control.CONTROL_FILE).exists()


@pytest.mark.parametrize("size", [0, 1, control.FRAME, control.FRAME + 1, 5 * control.FRAME])
def test_a_message_travels_in_frames_of_bounded_size(ranks, size):
    ranks.start(0, echo)
    ranks.master.wait_for_workers(10)
    ranks.master.send(0, Request(1, "long", {"text": "x" * size}))
    assert ranks.master.receive(10, "it").value["text"] == "x" * size


def test_frames_that_are_no_message_together_are_refused():
    with pytest.raises(ProtocolError, match="bytes; at most"):
        control.join([b"x" * (messages.LARGEST // 2)] * 3)


BUSY_MASTER = """
import sys
from pathlib import Path
from rlcli.runtime.transport import ZmqMaster

ZmqMaster(Path(sys.argv[1]), 1, lambda: None)
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def busy_master():
    """A master that reads nothing, in a process of its own; returns what a worker of it must know, and its memory."""
    meeting = MeetingFolder()
    home = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY_MASTER, str(meeting.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": home},
    )  # fmt: skip
    assert process.stdout.readline() == b"up\n"

    def resident():
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) << 10

    yield Control.read(meeting.path), resident
    process.kill()
    process.communicate()
    meeting.close()


def flood_without_the_key(told):
    """Well-formed messages, 400 MiB of them."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(told.address)
        for _ in range(100):
            try:
                stranger.send(b"x" * (4 << 20), zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.01)
        time.sleep(1)


def flood_below_zeromq(told):
    """Greetings, and after them a frame of 60 MiB that never ends, on many connections."""
    connections = []
    for mechanism in (b"NULL", b"CURVE") * 8:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(2)
        connections.append(connection)
        try:
            connection.connect(told.address.removeprefix("ipc://"))
            connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))
            time.sleep(0.02)
            connection.sendall(b"\x06" + (60 << 20).to_bytes(8, "big") + b"\x05HELLO")
            for _ in range(22):
                connection.sendall(b"x" * (1 << 20))
        except OSError:  # it was shut, as it should be
            continue
    time.sleep(1)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("flood", [flood_without_the_key, flood_below_zeromq])
def test_a_flood_of_strangers_takes_no_memory(busy_master, flood):
    told, resident = busy_master
    before = resident()
    flood(told)
    assert resident() - before < 16 << 20


def test_strangers_are_not_heard(ranks):
    stranger = ranks.stranger()
    stranger.send(pack(Report(0, HELLO, {"pid": 1}), b"wrong" * 6))
    stranger.send(b"\x93garbage")
    stranger.send_multipart([b"a", b"b", b""])
    with pytest.raises(errors.HangError, match="rank 0 to start"):
        ranks.master.wait_for_workers(1)
    assert ranks.master.rejected == 3
    assert ranks.master.pids == {}
    ranks.start(0, echo)
    ranks.master.wait_for_workers(10)
    stranger.close()


def test_a_rank_that_is_not_of_this_run_is_not_heard(ranks):
    stranger = ranks.stranger()
    stranger.send(pack(Report(5, HELLO, {"pid": 1}), ranks.master._token))
    with pytest.raises(errors.HangError):
        ranks.master.wait_for_workers(1)
    assert ranks.master.rejected == 1
    stranger.close()


def test_the_socket_drops_frames_that_are_too_long(ranks):
    stranger = ranks.stranger()
    stranger.send(b"x" * (2 * control.FRAME))
    with pytest.raises(errors.HangError):
        ranks.master.wait_for_workers(1)
    assert ranks.master.rejected == 0
    stranger.close()


def test_an_error_of_a_worker_arrives_and_the_worker_lives_on(ranks):
    def handle(request):
        if request.op == "bad":
            raise errors.DataError("row is bad", where="a.jsonl:3", code="F31")
        return {}

    ranks.start(0, handle)
    ranks.master.wait_for_workers(10)
    ranks.master.send(0, Request(1, "bad"))
    failure = ranks.master.receive(10, "it").failure
    assert (failure.kind, failure.code, failure.where) == ("DataError", "F31", "a.jsonl:3")
    ranks.master.send(0, Request(2, "good"))
    assert ranks.master.receive(10, "it").failure is None


def test_a_worker_that_cannot_start_says_why(ranks):
    link = ZmqWorker(ranks.folder, 0)
    link.fail(Failure.of(errors.ResourceError("no such device", code="R50"), "rank 0", ""))
    with pytest.raises(errors.ResourceError, match="no such device"):
        ranks.master.wait_for_workers(10)
    link.close()
    ranks.master.pids.clear()


def test_an_unexpected_error_may_be_the_echo_of_another_rank_that_died(ranks):
    def handle(request):
        if request.op == "shutdown":
            return {}
        ranks.dead = "rank 1 was killed"
        raise RuntimeError("Connection closed by peer")

    ranks.start(0, handle)
    ranks.master.wait_for_workers(10)
    ranks.master.send(0, Request(1, "train"))
    with pytest.raises(errors.WorkerError, match="rank 1 was killed"):
        ranks.master.receive(10, "it")
    ranks.dead = None


def test_waiting_ends_at_its_deadline(ranks):
    hold = threading.Event()
    ranks.start(0, lambda request: {} if request.op == "shutdown" else {"held": hold.wait(20)})
    ranks.master.wait_for_workers(10)
    ranks.master.send(0, Request(1, "train"))
    with pytest.raises(errors.HangError, match="actor_train on rank 0"):
        ranks.master.receive(1.5, "actor_train on rank 0")
    hold.set()


@pytest.fixture
def clock(monkeypatch):
    """`hurry` seconds pass at each look at it, besides those that do pass; `away` have passed."""
    told = SimpleNamespace(away=0.0, hurry=0.0)

    def monotonic():
        told.away += told.hurry
        return time.monotonic() + told.away

    for module in (transport, own_pauses):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    return told


@pytest.mark.parametrize(("deadline", "says"), [
    (15, r"no answer within 15 s, rank 0 has been silent for \d+ s: waiting for actor_train"),
    (3600, r"^error\[HANG\] rank 0 pid \d+: rank 0 has been silent for \d+ s: waiting for actor_train"),
])  # fmt: skip
def test_a_rank_without_heartbeat_is_the_one_that_is_named(ranks, monkeypatch, clock, deadline, says):
    monkeypatch.setattr(transport, "BEAT_SECONDS", 1000.0)
    monkeypatch.setattr(own_pauses, "PAUSE", 1000.0)
    monkeypatch.setattr(transport, "LONGEST_SILENCE", 20.0)
    ranks.start(0, echo)
    ranks.master.wait_for_workers(10)
    clock.hurry = 1.0
    with pytest.raises(errors.HangError, match=says) as raised:
        ranks.master.receive(deadline, "actor_train")
    clock.hurry = 0.0
    assert raised.value.where.startswith("rank 0 pid")


def test_a_master_that_was_away_blames_nobody(monkeypatch, clock):
    """Stopped by Ctrl-Z for an hour: the ranks' heartbeats are there, and unread."""
    monkeypatch.setattr(transport, "BEAT_SECONDS", 0.1)
    ranks, hold = Ranks(2), threading.Event()
    for rank in range(2):
        ranks.start(rank, lambda request: {} if request.op == "shutdown" else {"held": hold.wait(20)})
    ranks.master.wait_for_workers(10)
    ranks.master.send(0, Request(1, "train"))
    time.sleep(0.5)
    clock.away = 3600.0
    threading.Timer(0.5, hold.set).start()
    assert ranks.master.receive(600, "train").value == {"held": True}
    ranks.close()


def test_a_dead_launcher_is_noticed_while_waiting(ranks):
    ranks.start(0, echo)
    ranks.master.wait_for_workers(10)
    ranks.dead = "rank 0 is gone"
    with pytest.raises(errors.WorkerError, match="rank 0 is gone"):
        ranks.master.receive(10, "it")
    ranks.dead = None


def test_in_one_process_a_request_is_a_call():
    calls = []

    def handle(request):
        calls.append(request.op)
        return {"seen": len(calls)}

    inline = InlineTransport(handle)
    inline.send(0, Request(1, "a"))
    inline.send(0, Request(2, "b"))
    assert calls == []
    assert inline.receive(1, "a") == Reply(1, 0, {"seen": 1})
    assert inline.receive(1, "b") == Reply(2, 0, {"seen": 2})
    assert calls == ["a", "b"]


# -- reports -------------------------------------------------------------------------------------------------


def test_a_report_reaches_the_master_while_the_worker_is_busy(ranks):
    heard, busy = [], threading.Event()
    ranks.master.on_report = heard.append

    def work():
        link = ZmqWorker(ranks.folder, 0)

        def handle(request):
            if request.op == "call":
                thread = threading.Thread(target=link.report, args=("written", {"step": 4}))
                thread.start()
                busy.wait(20)
            return {}

        link.serve(handle, lambda error: Failure.of(error, "rank 0", ""))
        link.close()

    ranks.threads.append(threading.Thread(target=work, daemon=True))
    ranks.threads[-1].start()
    ranks.master.wait_for_workers(10)
    ranks.master.send(0, Request(1, "call"))
    assert ranks.master.receive(10, "a report") is None
    assert heard == [Report(0, "written", {"step": 4})]
    busy.set()
    assert ranks.master.receive(10, "the answer") == Reply(1, 0, {})


def test_what_a_rank_reported_before_it_died_is_heard(ranks):
    ranks.start(0, echo)
    ranks.master.wait_for_workers(10)
    heard = []
    ranks.master.on_report = heard.append
    link = ZmqWorker(ranks.folder, 0)
    for step in range(3):
        link.report("written", {"step": step})
    link.close()
    ranks.dead = "rank 0 is gone"
    for _ in range(3):
        assert ranks.master.receive(10, "a report") is None
    assert {report.value["step"] for report in heard} == {0, 1, 2}  # each came over a socket of its own
    with pytest.raises(errors.WorkerError):
        ranks.master.receive(10, "it")
    ranks.dead = None


def test_in_one_process_a_report_is_a_call_in_the_thread_that_reports():
    inline, heard = InlineTransport(lambda request: inline.report("written", {"step": 1}) or {}), []
    inline.on_report = heard.append
    inline.send(0, Request(1, "call"))
    assert inline.receive(1, "it") == Reply(1, 0, {})
    assert heard == [Report(0, "written", {"step": 1})]
    assert inline.receive(1, "a report") is None
    with pytest.raises(errors.HangError, match="waiting for the files"):
        inline.receive(0.05, "the files")


def test_requests_that_were_cancelled_are_not_carried_out():
    calls = []
    inline = InlineTransport(lambda request: calls.append(request.op) or {})
    requests = Requests(inline, 1, 1.0)
    requests.post("train", {0: {}}, lambda answers: None)
    requests.cancel()
    with pytest.raises(errors.HangError):
        requests.wait(0.05)
    assert calls == []
