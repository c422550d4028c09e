"""The store through which ranks find each other: torch's semantics, behind the run's own socket."""

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import zmq
from torch.distributed import DistStoreError, HashStore, PrefixStore, ProcessGroupGloo

from rlcli.launch.meeting import meeting_folder
from rlcli.messaging.control import Control
from rlcli.messaging.messages import Reply, Request, pack, unpack
from rlcli.messaging.store import RunStore
from rlcli.messaging.zmq_master import ZmqMaster


@pytest.fixture(params=[None, "127.0.0.1"], ids=["one node", "several"])
def control(request):
    meeting = meeting_folder()
    master = ZmqMaster(meeting.path, 1, lambda patience: None, request.param)
    yield Control.read(meeting.path)
    master.close()
    meeting.close()


@pytest.fixture
def stores(control):
    opened, context = [], zmq.Context()

    def open_one():
        opened.append(RunStore(control, context))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()
    context.term()


def outcomes(store):
    """What a store answers to everything that torch may ask."""
    store.set("text", "value")
    store.set("bytes", b"\0\xff")
    return [
        store.get("text"),
        store.get("bytes"),
        store.add("count", 2),
        store.add("count", -1),
        store.get("count"),
        store.check(["text", "bytes"]),
        store.check(["text", "absent"]),
        store.compare_set("new", "", "first"),
        store.compare_set("new", "other", "second"),
        store.compare_set("new", "first", "third"),
        store.compare_set("absent", "expected", "fourth"),
        store.check(["absent"]),
        store.num_keys(),
        store.delete_key("text"),
        store.delete_key("text"),
        store.check(["text"]),
        store.wait(["bytes"], timedelta(seconds=1)),
    ]


def test_answers_are_equal_to_those_of_the_store_of_torch(stores):
    assert outcomes(stores()) == outcomes(HashStore())


def test_torch_reaches_every_operation_behind_a_prefix(stores):
    store = stores()
    assert outcomes(PrefixStore("group", store)) == outcomes(HashStore())
    assert store.check(["group/bytes"])


def test_one_process_sees_what_another_has_set(stores):
    stores().set("key", "value")
    assert stores().get("key") == b"value"


def test_a_thread_that_waits_does_not_keep_others_waiting(stores):
    store, heard = stores(), []
    waiting = threading.Thread(target=lambda: heard.append(store.get("late")))
    waiting.start()
    time.sleep(0.2)
    began = time.monotonic()
    store.set("early", "x")
    assert store.get("early") == b"x"
    assert time.monotonic() - began < 1
    store.set("late", "y")
    waiting.join(5)
    assert heard == [b"y"]


def test_waiting_for_a_name_that_is_not_set_raises_after_its_timeout(stores):
    with pytest.raises(DistStoreError, match=r"nothing has set one, two within 0\.1 s"):
        stores().wait(["one", "two"], timedelta(seconds=0.1))
    store = stores()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(DistStoreError, match="nothing has set one"):
        store.get("one")


def test_a_closed_store_is_an_error(stores):
    store = stores()
    store.close()
    with pytest.raises(DistStoreError, match="closed"):
        store.set("key", "value")


@pytest.mark.parametrize(
    "question",
    [
        Request(1, "nothing"),
        Request(1, "set"),
        Request(1, "check", {"keys": 3}),
        Reply(1, 0),
        Request(1, "_values"),
    ],
    ids=lambda question: str(question)[:40],
)
def test_malformed_questions_are_discarded_and_later_ones_answered(control, stores, question):
    context = zmq.Context()
    socket = control.connect(context, control.pulses)
    socket.linger = 0
    for token in (control.token, b"x" * 32):
        socket.send(pack(question, token))
    socket.send(pack(Request(7, "count"), control.token))
    assert socket.poll(5000)
    assert unpack(socket.recv_multipart(), control.token, Reply) == Reply(7, 0, {"value": 0})
    socket.close()
    context.term()


def test_ranks_connect_only_to_those_they_exchange_tensors_with(stores, monkeypatch):
    """One descriptor for each peer in use, where a full mesh takes one for every other rank."""
    ranks = 24
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    groups, opened = [None] * ranks, [stores() for _ in range(ranks)]
    before = len(os.listdir("/proc/self/fd"))

    def on_all(action):
        threads = [threading.Thread(target=action, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    def join(rank):
        groups[rank] = ProcessGroupGloo(
            PrefixStore("lane", opened[rank]), rank, ranks, timedelta(seconds=30)
        )

    def send_to_the_next_even_rank(rank):
        tensor = torch.full((3,), float(rank))
        if rank % 2 == 0:
            groups[rank].send([tensor], rank + 1, 0).wait()
        else:
            groups[rank].recv([tensor], rank - 1, 0).wait()
            assert tensor.tolist() == [rank - 1.0] * 3

    on_all(join)
    on_all(send_to_the_next_even_rank)
    assert len(os.listdir("/proc/self/fd")) - before < 10 * ranks  # a full mesh takes 27 for each
