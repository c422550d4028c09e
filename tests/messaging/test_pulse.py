"""Heartbeats between nodes, and what a network that misbehaves does to them."""

import threading
import time
from dataclasses import replace

import pytest
import zmq
from tcp_proxy import TcpProxy

from rlcli.errors import WorkerError
from rlcli.launch.meeting import meeting_folder
from rlcli.messaging import pulse
from rlcli.messaging.control import CONTROL_FILE, Control
from rlcli.messaging.messages import Failure, Reply, Request
from rlcli.messaging.pulse import END, Pulse
from rlcli.messaging.zmq_master import ZmqMaster
from rlcli.messaging.zmq_worker import ZmqWorker

BEAT = 0.1


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pulse, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr(pulse, "TICK", 0.02)
    monkeypatch.setattr(pulse, "LOST_AFTER", 3.0)


@pytest.fixture
def master():
    meeting = meeting_folder()
    made = ZmqMaster(meeting.path, 1, lambda patience: None, "127.0.0.1")
    made.folder = meeting.path
    yield made
    made.close()
    meeting.close()


class Peer:
    """A process of the run that notes when it ought to end."""

    def __init__(self, control):
        self.why = []
        self.is_lost = threading.Event()
        self.context = zmq.Context()
        self.pulse = Pulse(self.context, control, ("node", 1), self.lose)

    def lose(self, why):
        self.why.append(why)
        self.is_lost.set()

    def close(self):
        self.pulse.close()
        self.context.term()


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def proxied(control, requests=None, pulses=None):
    """The same with other addresses."""
    proxies = {"requests": requests, "pulses": pulses}
    addresses = {name: f"tcp://{proxy.address}" for name, proxy in proxies.items() if proxy}
    return replace(control, **addresses)


def target(address):
    return address.removeprefix("tcp://")


def test_the_master_knows_the_facts_that_each_process_reports(master):
    peer = Peer(Control.read(master.folder))
    peer.pulse.tell(host="there")
    wait_for(lambda: master.pulses.facts.get(("node", 1), {}).get("host") == "there")
    peer.pulse.tell_last(10, is_over=True)
    assert master.pulses.facts["node", 1]["is_over"]
    peer.close()


def test_a_process_that_loses_the_master_ends_itself(master):
    peer = Peer(Control.read(master.folder))
    wait_for(lambda: ("node", 1) in master.pulses.heard)
    master.pulses.close()
    assert not peer.is_lost.wait(1.0)
    assert peer.is_lost.wait(10)
    assert "has not been heard from for 3 s" in peer.why[0]
    peer.close()


@pytest.mark.long
def test_silence_on_one_node_ends_no_process():
    """There the parent's death is; and the master may be stopped for hours."""
    meeting = meeting_folder()
    master = ZmqMaster(meeting.path, 1, lambda patience: None)
    peer = Peer(Control.read(meeting.path))
    wait_for(lambda: ("node", 1) in master.pulses.heard)
    master.pulses.close()
    assert not peer.is_lost.wait(4.5)
    peer.close()
    master.close()
    meeting.close()


def test_all_processes_are_asked_to_end_when_the_run_has_ended(master):
    peer = Peer(Control.read(master.folder))
    wait_for(lambda: ("node", 1) in master.pulses.heard)
    master.pulses.is_over = True
    assert peer.is_lost.wait(10)
    assert peer.why[0] == END
    wait_for(lambda: ("node", 1) in master.pulses.dismissed)  # noted once the answer is sent
    peer.close()


def test_heartbeats_of_strangers_are_discarded(master):
    peer = Peer(replace(Control.read(master.folder), token=b"wrong" * 6))
    assert not peer.is_lost.wait(1.0)
    assert master.pulses.heard == {}
    peer.close()


def test_a_connection_that_is_reset_is_reestablished(master):
    control = Control.read(master.folder)
    with TcpProxy(target(control.pulses)) as proxy:
        peer = Peer(proxied(control, pulses=proxy))
        wait_for(lambda: ("node", 1) in master.pulses.heard)
        assert proxy.reset() == 1
        began = time.monotonic()
        wait_for(lambda: master.pulses.heard["node", 1] > began + 0.5)
        assert not peer.is_lost.is_set()
        peer.close()


@pytest.mark.long
def test_a_delay_shorter_than_three_heartbeats_ends_no_process(master):
    control = Control.read(master.folder)
    with TcpProxy(target(control.pulses)) as proxy:
        peer = Peer(proxied(control, pulses=proxy))
        wait_for(lambda: ("node", 1) in master.pulses.heard)
        proxy.delay = 1.0  # there and back: two thirds of what is allowed, as 10 s are of 15
        assert not peer.is_lost.wait(5)
        peer.close()


def test_a_connection_that_is_not_read_any_more_is_noticed_at_both_ends(master):
    control = Control.read(master.folder)
    with TcpProxy(target(control.pulses)) as proxy:
        peer = Peer(proxied(control, pulses=proxy))
        wait_for(lambda: ("node", 1) in master.pulses.heard)
        proxy.is_stalled = True
        assert peer.is_lost.wait(10)
        assert master.silences()["node", 1] > 2
        peer.close()


def test_requests_that_may_be_lost_with_their_connection_end_the_run(master):
    """The worker is named at once, and not when a call's hour is over."""
    control = Control.read(master.folder)
    with TcpProxy(target(control.requests)) as proxy:
        (master.folder / "elsewhere").mkdir()
        proxied(control, requests=proxy).write(master.folder / "elsewhere")
        link = ZmqWorker(master.folder / "elsewhere", 0)
        threading.Thread(target=serve, args=(link,), daemon=True).start()
        master.wait_for_workers(30)
        master.send(0, Request(1, "call"))
        assert master.receive(30, "call") == Reply(1, 0, {})
        proxy.delay = 1.0
        master.send(0, Request(2, "call"))
        assert master.receive(30, "call") == Reply(2, 0, {})
        assert proxy.reset() == 1
        with pytest.raises(
            WorkerError, match="the connection between the master and rank 0 was lost"
        ) as raised:
            master.receive(30, "call")
        assert raised.value.where.startswith("rank 0 pid")
        link.pulse.close()  # else it would end this process, whose master is gone


def serve(link: ZmqWorker):
    link.serve(lambda request: {}, lambda error: Failure.of(error, "rank 0"))


def test_the_control_file_is_read_as_written_and_no_other_file_remains(tmp_path):
    whole = Control("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "k", "c", "s", b"t" * 32)
    whole.write(tmp_path)
    assert Control.read(tmp_path) == whole
    assert [file.name for file in tmp_path.iterdir()] == [CONTROL_FILE]
