"""A rank's end of a pool, with peers that are threads of this process: what it does when one dies,
or cannot start."""

import threading

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.errors import DataError, WorkerError
from rlcli.messaging import zmq_master, zmq_worker
from rlcli.messaging.messages import Failure
from rlcli.messaging.zmq_worker import ZmqWorker
from rlcli.runtime.pool import RUN, PoolProcess, packed, unpacked
from rlcli.topology.groups import GIVEN_UP


def batch(keys=("rewards",)):
    data = {key: torch.tensor([1.5, float("nan")]) for key in keys}
    return SequenceSample(
        ids=["a", "b"],
        seqlens={key: [[1], [1]] for key in keys},
        data=data,
        metadata={"why": [None, "so"]},
    )


class Died(BaseException):
    """What a peer raises instead of an answer."""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.setattr(zmq_master, "FIND_CULPRIT_WITHIN", 0.2)
    # a peer that has lost us would end this process
    monkeypatch.setattr(zmq_worker, "_end_here", lambda why: None)
    (tmp_path / "pools/reward-pool0").mkdir(parents=True)
    made = PoolProcess(tmp_path / "pools/reward-pool0")
    yield made
    made.close()


def start(folder, answer, **hello):
    """A process of the pool, until `answer` raises Died."""

    def work():
        link = ZmqWorker(folder, 0)
        try:
            link.serve(answer, lambda error: Failure.of(error, "reward-pool0"), cpu_s=7.0, **hello)
        except Died:
            link.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def echo(request):
    return {"batch": request.args["batch"], "tensors": request.args["tensors"]}


def die(request):
    raise Died


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "pools/reward-pool0"


def test_a_batch_is_equal_after_it_was_sent_to_a_pool():
    sent = batch(("rewards", "solved"))
    got = unpacked(packed(sent))
    assert (got.ids, got.seqlens, got.metadata) == (sent.ids, sent.seqlens, sent.metadata)
    assert (
        got.data["rewards"].view(torch.int32).tolist()
        == sent.data["rewards"].view(torch.int32).tolist()
    )


def test_a_batch_without_keys_arrives():
    assert unpacked(packed(SequenceSample(ids=["a"], seqlens={}, data={}))).ids == ["a"]


def test_a_request_is_sent_again_if_its_process_dies(pool, folder):
    first = start(folder, die)
    pool.wait(20)
    threading.Thread(
        target=lambda: (first.join(), start(folder, echo, last_exit=-9)), daemon=True
    ).start()
    assert pool.run("score", 1, batch()).ids == ["a", "b"]


def test_a_process_that_died_between_requests_is_replaced(pool, folder):
    first = start(folder, echo, until=RUN)
    pool.wait(20)
    pool.run("score", 1, batch())
    first.join()
    threading.Timer(1.0, start, (folder, echo), {"last_exit": 1}).start()
    assert pool.run("score", 2, batch()).ids == ["a", "b"]


def test_a_call_that_kills_two_processes_ends_the_run(pool, folder):
    first = start(folder, die)
    pool.wait(20)
    threading.Thread(
        target=lambda: (
            first.join(),
            start(folder, die, last_exit=-9).join(),
            start(folder, die, last_exit=-27),
        ),
        daemon=True,
    ).start()
    with pytest.raises(WorkerError) as caught:
        pool.run("score", 1, batch())
    died = (
        "reward-pool0 was killed by SIGPROF, as it used more than 7 s of processor time for a call"
    )
    assert caught.value.what == f"{died} while it worked on call score, 2 times"
    assert (caught.value.code, caught.value.where) == ("F01", "reward-pool0")


def test_a_process_that_is_no_longer_replaced_is_not_waited_for(pool, folder):
    (folder / GIVEN_UP).write_text("ended with exit code 1, 4 times")
    with pytest.raises(WorkerError, match="reward-pool0 ended with exit code 1, 4 times"):
        pool.wait(60)


def test_the_error_of_a_call_in_a_pool_is_raised(pool, folder):
    def refuse(request):
        raise DataError("no answer", where="rows.jsonl:7", code="F31")

    start(folder, refuse)
    pool.wait(20)
    with pytest.raises(DataError, match="no answer") as caught:
        pool.run("score", 1, batch())
    assert (caught.value.code, caught.value.where) == ("F31", "rows.jsonl:7")
