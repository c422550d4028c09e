"""One rank under torchrun: `python -m rlcli.runtime.worker_main RUN_DIR`."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import log_printably
from rlcli.files import open_private
from rlcli.garbage import collect_rarely, leave_garbage
from rlcli.processes import die_with_parent, keep_private

if TYPE_CHECKING:
    from rlcli.messaging.messages import FailureOf, Tell
    from rlcli.messaging.store import RunStore
    from rlcli.messaging.zmq_worker import ZmqWorker
    from rlcli.recipe.schema import Recipe
    from rlcli.runtime.data_lane import DataLane
    from rlcli.runtime.worker import ModelWorker

MEETING = "RLCLI_MEETING"
"""Names the folder in which master, agents and ranks find each other (see `launch.meeting`)."""
WORKER_FILE = "worker.json"
"""The recipe as ranks and agents read it, in the run's folder."""
AGENT = "RLCLI_AGENT"
"""Process id of the node's agent, the parent of its ranks."""
NODE = "GROUP_RANK"
"""The number of the node, as torchrun passes it to ranks."""
CALLS_AT_ONCE = 256
"""Calls that generate side by side on a rank; more wait for one to end."""


def main(run_dir: Path) -> None:
    collect_rarely()
    keep_private()
    log_printably()
    _die_with_parent()
    _leave_stopping_to_the_master()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    _log_to(run_dir / "logs" / f"rank{rank}.log")
    _serve(run_dir, rank, local_rank)
    leave_garbage()


def read_recipe(run_dir: Path) -> Recipe:
    """The recipe of a run, as its ranks, agents and pools use it."""
    from rlcli.recipe.schema import Recipe

    return Recipe.model_validate(json.loads((run_dir / WORKER_FILE).read_text()))


def _serve(run_dir: Path, rank: int, local_rank: int) -> None:
    """Serve as this rank until the master shuts it down."""
    import torch.distributed as dist

    from rlcli.messaging.control import Control
    from rlcli.messaging.messages import logged_failure, report_warnings
    from rlcli.messaging.store import RunStore
    from rlcli.messaging.zmq_worker import ZmqWorker

    failure = logged_failure(f"rank {rank} pid {os.getpid()}")
    link = ZmqWorker(_meeting(), rank, int(os.environ[NODE]))
    store = RunStore(Control.read(_meeting()), link.context, link.pulse.watch)
    try:
        worker, data_lane = _start(run_dir, rank, local_rank, store, link.report)
    except Exception as error:
        link.fail(failure(error))
        link.close()
        sys.exit(1)
    report_warnings(link.report)
    _answer_requests(worker, data_lane, link, failure)
    worker.meshes.clear()
    del worker, data_lane
    gc.collect()  # collect whatever holds the process group before it is destroyed
    dist.barrier()
    dist.destroy_process_group()
    store.close()
    link.close()


def _answer_requests(
    worker: ModelWorker, data_lane: DataLane, link: ZmqWorker, failure: FailureOf
) -> None:
    """Answer the master until it shuts this rank down; each lane has a thread."""
    from rlcli.messaging.messages import END_LANE
    from rlcli.messaging.zmq_worker import ZmqWorker
    from rlcli.topology.groups import MOVES, lanes_of, pausing_roles, responses_name

    def serve_lane(lane: str) -> None:
        lane_link = ZmqWorker(_meeting(), worker.rank, main=link)
        handle = data_lane.handle if lane == MOVES else worker.handle
        at_once = CALLS_AT_ONCE if lane in side_by_side else 1
        lane_link.serve(handle, failure, until=END_LANE, at_once=at_once, lane=lane)
        lane_link.close()

    pausing = pausing_roles(worker.recipe, worker.topology)
    side_by_side = {responses_name(role) for role in pausing}
    ranks_of = lanes_of(worker.recipe, worker.topology)
    lanes = [lane for lane, ranks in ranks_of.items() if worker.rank in ranks]
    threads = [
        threading.Thread(target=serve_lane, args=(lane,), name=lane, daemon=True) for lane in lanes
    ]
    for thread in threads:
        thread.start()
    link.serve(worker.handle, failure, lanes=lanes)
    for thread in threads:
        thread.join()


def _meeting() -> Path:
    """The folder in which this rank finds the master."""
    return Path(os.environ[MEETING])


def _start(
    run_dir: Path, rank: int, local_rank: int, store: RunStore, report: Tell
) -> tuple[ModelWorker, DataLane]:
    """The worker of this rank, once all ranks have found each other, and its data lane, which a
    single rank does not use."""
    import torch
    import torch.distributed as dist

    from rlcli.runtime.data_lane import DataLane
    from rlcli.runtime.roles import make_meshes, pick_device
    from rlcli.runtime.worker import ModelWorker
    from rlcli.topology import plan_topology

    recipe = read_recipe(run_dir)
    topology = plan_topology(recipe)
    device = pick_device(recipe.cluster.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=max(recipe.launch.startup_deadline, recipe.launch.step_deadline))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=topology.world_size,
        timeout=timeout,
    )
    worker = ModelWorker(
        recipe, topology, rank, device, make_meshes(topology, device.type), report, run_dir
    )
    return worker, DataLane(rank, worker.samples, device, timeout)


def _log_to(path: Path) -> None:
    """Redirect everything that this process prints, libraries included, to its own file."""
    descriptor = open_private(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())


def _die_with_parent() -> None:
    """Ask for SIGKILL once the agent, which ends with the master, is gone.
    Called before torch's slow import."""
    die_with_parent()
    if os.getppid() != int(os.environ[AGENT]):  # it was gone before we asked
        sys.exit(1)


def _leave_stopping_to_the_master() -> None:
    """Do not stop when a scheduler signals every process of a job: the master's processes request
    an orderly stop.

    SIGTERM gets a handler instead of being ignored, so that it can still end child processes.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    # a master that gives up waiting asks where we are
    faulthandler.register(signal.SIGUSR1, all_threads=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
