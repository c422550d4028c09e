"""`run_on_ranks`: results by rank, exact numbers, and reports of ranks that fail, hang or die; the
clock by which ranks are late."""

import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlcli.processes import ProcessClock
from rlcli.testing import ranks
from rlcli.testing.contract import Violation
from rlcli.testing.ranks import RankDeath, RankError, RankTimeout, mesh_of_ranks, run_on_ranks


def test_ranks_compute_together_and_return_exact_floats():
    third = torch.tensor([1.0, 2.0], dtype=torch.float64) / 3

    def work(rank):
        total = third * (rank + 1)
        dist.all_reduce(total)
        mesh = mesh_of_ranks(dp=2)
        return {
            "rank": rank,
            "size": mesh["dp"].size(),
            "total": total.tolist(),
            "threads": torch.get_num_threads(),
        }

    assert run_on_ranks(2, work) == [
        {"rank": rank, "size": 2, "total": (third + 2 * third).tolist(), "threads": 1}
        for rank in range(2)
    ]
    assert not dist.is_initialized()


def test_a_single_rank_can_compute_gradients():
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()  # the parent has used autograd, too

    def work(rank):
        weight.grad = None
        (weight * 3).sum().backward()
        return {"gradient": weight.grad.tolist()}

    assert run_on_ranks(1, work) == [{"gradient": [3.0] * 3}]
    assert weight.grad.tolist() == [2.0] * 3


def test_an_error_is_reported_with_its_traceback_while_other_ranks_wait():
    def work(rank):
        if rank == 1:
            raise ValueError("no such token")
        dist.barrier()
        return {}

    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1: ValueError: no such token\n[^$]*in work"):
        run_on_ranks(2, work)
    assert time.monotonic() - began < 30


def test_a_violation_in_a_rank_stays_a_violation():
    def work(rank):
        raise Violation("loss differs by 0.5", "divide once", "here.py:3")

    with pytest.raises(Violation) as caught:
        run_on_ranks(2, work)
    assert (caught.value.finding, caught.value.cause, caught.value.where) == (
        "loss differs by 0.5",
        "divide once",
        "here.py:3",
    )


@pytest.mark.long
def test_a_hanging_rank_is_ended_and_its_stack_is_reported(tmp_path):
    def work(rank):
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        if rank == 0:
            dist.barrier()
        else:
            time.sleep(60)
        return {}

    with pytest.raises(
        RankTimeout, match=r"2 of 2 ranks did not finish within 10 s\nrank 0 was at\n"
    ) as caught:
        run_on_ranks(2, work, timeout=10)
    assert {(frames[-1][0], frames[-1][2]) for frames in caught.value.stacks.values()} == {
        (__file__, "work")
    }
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_a_rank_that_dies_is_reported():
    with pytest.raises(RankError, match="rank 0: died without a word"):
        run_on_ranks(1, lambda rank: os.kill(os.getpid(), signal.SIGKILL) or {})


LOST = "[pair.cc:553] Connection closed by peer [127.0.0.1]:26546"


def test_the_rank_that_died_is_the_cause_where_another_lost_it():
    def work(rank):
        if rank == 1:
            raise RuntimeError(LOST)
        time.sleep(0.2)  # its connections end before it does
        os.write(2, b"terminate called\n  what():  sizes do not match\n")
        os.abort()

    with pytest.raises(RankDeath, match="rank 0: died sizes do not match"):
        run_on_ranks(2, work)


def test_ranks_that_nobody_answers_any_more_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(ranks, "_GRACE", 0.2)

    def work(rank):
        if rank == 1:
            raise RuntimeError(LOST)
        time.sleep(100)
        return {}

    with pytest.raises(RankError, match=r"rank 1: RuntimeError: .*closed by peer"):
        run_on_ranks(2, work)


def test_a_result_that_is_not_json_is_an_error_of_the_rank():
    with pytest.raises(RankError, match="TypeError"):
        run_on_ranks(1, lambda rank: {"tensor": torch.ones(1)})


def test_objects_of_the_parent_are_not_finalised_in_a_rank():
    """Its process groups and sockets have threads, which no fork has:
    to end them there would crash."""
    parent = os.getpid()

    class Garbage:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            if os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)

    gc.disable()
    try:
        Garbage()
        assert run_on_ranks(1, lambda rank: {"found": gc.collect() >= 0}) == [{"found": True}]
    finally:
        gc.enable()
        gc.collect()


def test_process_groups_of_the_parent_are_not_ended_in_a_rank():
    """Libraries leave some. To end one in a fork would wait for its threads; new ones may have got
    their addresses."""
    before = set(distributed_c10d._world.pg_map)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(3):
        dist.new_group([0], use_local_synchronization=True)
    distributed_c10d._update_default_pg(None)

    def work(rank):
        return {"size": mesh_of_ranks(dp=2)["dp"].size()}

    try:
        began = time.monotonic()
        assert run_on_ranks(2, work) == [{"size": 2}] * 2
        assert time.monotonic() - began < 15
    finally:
        for group in distributed_c10d._world.pg_map.keys() - before:
            dist.destroy_process_group(group)


def started(program):
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", program])


def test_time_in_which_others_compute_does_not_count():
    """Of four processes on one core, each computes for a quarter of the time."""
    core = min(os.sched_getaffinity(0))
    spinning = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    processes = [started(spinning) for _ in range(4)]
    try:
        time.sleep(0.5)
        clock, began = ProcessClock([processes[0].pid]), time.monotonic()
        while time.monotonic() - began < 2:
            clock.seconds()
            time.sleep(0.05)
        assert clock.seconds() < 0.7 * (time.monotonic() - began)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_time_in_which_processes_wait_counts():
    with started("import time; time.sleep(60)") as process:
        try:
            clock = ProcessClock([process.pid])
            while clock.seconds() < 0.5:
                time.sleep(0.05)
        finally:
            process.kill()
