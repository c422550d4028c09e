"""The control plane: who may speak, what is understood, and what happens when nobody answers."""

import stat
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from rlcli import errors, processes
from rlcli.launch.meeting import meeting_folder
from rlcli.messaging import control, messages, pulse, zmq_master
from rlcli.messaging.control import Control
from rlcli.messaging.inline_transport import InlineTransport
from rlcli.messaging.messages import HELLO, Failure, ProtocolError, Reply, Report, Request, pack
from rlcli.messaging.zmq_master import ZmqMaster
from rlcli.messaging.zmq_worker import ZmqWorker


class Ranks:
    """A master, and workers that are threads of this process."""

    def __init__(self, size=1, host=None):
        self.meeting = meeting_folder()
        self.folder = self.meeting.path
        self.dead = None
        self.master = ZmqMaster(self.folder, size, self.check, host)
        self.threads = []

    def check(self, patience):
        if self.dead:
            raise errors.WorkerError(self.dead)

    def start(self, rank, handle):
        def work():
            link = ZmqWorker(self.folder, rank)
            link.serve(handle, lambda error: Failure.of(error, f"rank {rank}"))
            link.close()

        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()

    def stranger(self):
        """A socket that knows address and key, and not the token."""
        control = Control.read(self.folder)
        socket = control.connect(zmq.Context.instance(), control.requests)
        socket.linger = 0
        return socket

    def close(self):
        for rank in self.master.pids:
            self.master.send(rank, Request(99, "shutdown"))
        for thread in self.threads:
            thread.join(5)
        self.master.close()
        self.meeting.close()


@pytest.fixture(params=[None, "127.0.0.1"], ids=["one node", "several"])
def ranks(request):
    made = Ranks(host=request.param)
    yield made
    made.close()


def echo(request):
    return {"op": request.op, **request.args}


def test_a_request_reaches_the_worker_and_its_answer_the_master(ranks):
    ranks.start(0, echo)
    ranks.master.wait_for_workers(10)
    ranks.master.send(0, Request(1, "first", {"x": 1}))
    ranks.master.send(0, Request(2, "second"))
    assert ranks.master.receive(10, "answers") == Reply(1, 0, {"op": "first", "x": 1})
    assert ranks.master.receive(10, "answers") == Reply(2, 0, {"op": "second"})


def test_on_one_node_the_master_listens_in_a_folder_for_its_owner_alone():
    ranks = Ranks()
    control = Control.read(ranks.folder)
    for address in (control.requests, control.pulses):
        assert Path(address.removeprefix("ipc://")).parent == ranks.folder
    assert stat.S_IMODE(ranks.folder.stat().st_mode) == 0o700
    ranks.close()


def test_between_nodes_the_master_listens_on_one_interface():
    ranks = Ranks(host="127.0.0.1")
    control = Control.read(ranks.folder)
    addresses = (control.requests, control.pulses)
    assert [address.rpartition(":")[0] for address in addresses] == ["tcp://127.0.0.1"] * 2
    ranks.close()


def test_an_address_that_is_not_ours_cannot_be_listened_on(tmp_path):
    with pytest.raises(errors.ResourceError, match=r"cannot listen on 192\.0\.2\.1") as raised:
        ZmqMaster(tmp_path, 1, lambda patience: None, "192.0.2.1")
    assert raised.value.code == "F58"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["client", "key"])
def test_a_client_with_the_key_of_another_run_is_rejected(ranks, field):
    other, secret = (key.decode() for key in zmq.curve_keypair())
    wrong = {"client": other, "secret": secret} if field == "client" else {"key": other}
    control = replace(Control.read(ranks.folder), **wrong)
    with zmq.Context() as context:
        stranger = control.connect(context, control.requests)
        stranger.linger = 0
        with suppress(zmq.Again):  # it may be rejected before it can send
            stranger.send(pack(Report(0, HELLO, {"pid": 1}), control.token), zmq.NOBLOCK)
        with pytest.raises(errors.HangError, match="rank 0 to start"):
            ranks.master.wait_for_workers(1)
        stranger.close()
    assert ranks.master.pids == {}
    assert ranks.master.rejected == 0


def test_the_control_file_is_readable_by_its_owner_alone(ranks):
    file = ranks.folder / control.CONTROL_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(Control.read(ranks.folder).token) == 32


def test_the_control_file_is_removed_when_the_master_closes(ranks):
    ranks.master.close()
    assert not (ranks.folder / control.CONTROL_FILE).exists()


@pytest.mark.parametrize("size", [0, 1, control.FRAME, control.FRAME + 1, 5 * control.FRAME])
def test_a_message_travels_in_frames_of_bounded_size(ranks, size):
    ranks.start(0, echo)
    ranks.master.wait_for_workers(10)
    ranks.master.send(0, Request(1, "long", {"text": "x" * size}))
    assert ranks.master.receive(10, "it").value["text"] == "x" * size


def test_frames_that_do_not_make_a_message_are_refused():
    with pytest.raises(ProtocolError, match="bytes; at most"):
        messages.unpack([b"x" * 100] * 3, b"token", Reply, most=250)


def test_rows_of_a_step_may_have_much_metadata(ranks):
    tests = ["x" * (1 << 20)] * 65
    ranks.start(0, lambda request: {"batch": {"metadata": {"tests": tests}}})
    ranks.master.wait_for_workers(10)
    ranks.master.send(0, Request(1, "load_rows"))
    reply = ranks.master.receive(60, "rows")
    assert reply.failure is None
    assert reply.value["batch"]["metadata"]["tests"] == tests


def test_messages_of_strangers_are_discarded(ranks):
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


def test_messages_of_a_rank_beyond_the_run_are_discarded(ranks):
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


def test_an_error_of_a_worker_is_sent_and_the_worker_continues(ranks):
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


@pytest.mark.long
def test_an_answer_that_cannot_be_sent_is_an_error_and_the_worker_continues(ranks):
    ranks.start(0, lambda request: {"odd": {1}} if request.op == "bad" else {})
    ranks.master.wait_for_workers(10)
    ranks.master.send(0, Request(1, "bad"))
    failure = ranks.master.receive(10, "it").failure
    assert failure.message == "the answer cannot be sent: a set cannot be sent in a message: {1}"
    ranks.master.send(0, Request(2, "good"))
    assert ranks.master.receive(10, "it").failure is None


def test_a_worker_that_cannot_start_says_why(ranks):
    link = ZmqWorker(ranks.folder, 0)
    link.fail(Failure.of(errors.ResourceError("no such device", code="R50"), "rank 0"))
    with pytest.raises(errors.ResourceError, match="no such device"):
        ranks.master.wait_for_workers(10)
    link.close()
    ranks.master.pids.clear()


def test_the_death_of_a_rank_is_shown_instead_of_the_errors_that_follow_from_it(ranks):
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

    for module in (zmq_master, processes):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    return told


@pytest.mark.parametrize(
    ("deadline", "says"),
    [
        (15, r"no answer within 15 s, rank 0 has been silent for \d+ s: waiting for actor_train"),
        (
            3600,
            (
                r"^error\[HANG\] rank 0 pid \d+: rank 0 has been silent for \d+ s: "
                r"waiting for actor_train"
            ),
        ),
    ],
)
def test_a_rank_without_heartbeats_is_named_in_the_error(ranks, monkeypatch, clock, deadline, says):
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 1000.0)
    monkeypatch.setattr(processes, "PAUSE", 1000.0)
    monkeypatch.setattr(zmq_master, "LONGEST_SILENCE", 20.0)
    ranks.start(0, echo)
    ranks.master.wait_for_workers(10)
    clock.hurry = 1.0
    with pytest.raises(errors.HangError, match=says) as raised:
        ranks.master.receive(deadline, "actor_train")
    clock.hurry = 0.0
    assert raised.value.where.startswith("rank 0 pid")


def test_a_pause_of_the_master_counts_against_no_rank(monkeypatch, clock):
    """Stopped by Ctrl-Z for an hour: the ranks' heartbeats are there, and unread."""
    monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.1)
    ranks, hold = Ranks(2), threading.Event()
    for rank in range(2):
        ranks.start(
            rank, lambda request: {} if request.op == "shutdown" else {"held": hold.wait(20)}
        )
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
    assert calls == ["a"]
    inline.send(0, Request(2, "b"))
    assert inline.receive(1, "a") == Reply(1, 0, {"seen": 1})
    assert inline.receive(1, "b") == Reply(2, 0, {"seen": 2})
    assert calls == ["a", "b"]


# -- reports ---------------------------------------------------------------------------------------


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

        link.serve(handle, lambda error: Failure.of(error, "rank 0"))
        link.close()

    ranks.threads.append(threading.Thread(target=work, daemon=True))
    ranks.threads[-1].start()
    ranks.master.wait_for_workers(10)
    ranks.master.send(0, Request(1, "call"))
    assert ranks.master.receive(10, "a report") is None
    assert heard == [Report(0, "written", {"step": 4})]
    busy.set()
    assert ranks.master.receive(10, "the answer") == Reply(1, 0, {})


def test_a_report_that_a_rank_sent_before_it_died_is_read(ranks):
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
    # each came over a socket of its own
    assert {report.value["step"] for report in heard} == {0, 1, 2}
    with pytest.raises(errors.WorkerError):
        ranks.master.receive(10, "it")
    ranks.dead = None


def test_in_one_process_a_report_is_a_call_in_the_thread_that_reports():
    inline, heard = InlineTransport(lambda request: inline.report("written", {"step": 1}) or {}), []
    inline.on_report = heard.append
    inline.send(0, Request(1, "call"))
    assert heard == [Report(0, "written", {"step": 1})]
    assert inline.receive(1, "a report") is None
    assert inline.receive(1, "it") == Reply(1, 0, {})
    with pytest.raises(errors.HangError, match="waiting for the files"):
        inline.receive(0.05, "the files")


@pytest.mark.long
def test_processes_are_checked_while_replies_keep_coming(ranks, monkeypatch):
    """Else the silence of an agent is noticed only once a run is idle."""
    monkeypatch.setattr(zmq_master, "CHECK_SECONDS", 0.2)
    ranks.start(0, echo)
    ranks.master.wait_for_workers(10)
    checked, end, number = [], time.monotonic() + 0.5, 0
    ranks.master._is_alive = checked.append
    while time.monotonic() < end:
        number += 1
        ranks.master.send(0, Request(number, "quick"))
        assert ranks.master.receive(5, "answers") is not None
    assert 1 <= len(checked) <= 4


def test_the_error_of_ranks_that_are_missing_names_the_limit_and_its_key():
    ranks = Ranks(size=3)
    ranks.start(1, echo)
    expected = r"no answer within 1 s: waiting for rank 0 to start \(2 of 3 are missing\)"
    with pytest.raises(errors.HangError, match=expected) as raised:
        ranks.master.wait_for_workers(1.2)
    assert "launch.startup_deadline is the limit" in raised.value.hint
    ranks.close()
