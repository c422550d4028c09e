"""One rank under torchrun: `python -m rlcli.runtime.worker_main RUN_DIR`."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from rlcli.recipe.schema import Recipe
from rlcli.runtime.messages import Failure
from rlcli.runtime.roles import make_meshes, pick_device
from rlcli.runtime.transport import serve
from rlcli.runtime.worker import ModelWorker
from rlcli.topology import plan_topology


def main(run_dir: Path) -> None:
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    _log_to(run_dir / "logs" / f"rank{rank}.log")
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the master decides when to stop
    recipe = Recipe.model_validate(json.loads((run_dir / "worker.json").read_text()))
    topology = plan_topology(recipe)
    device = pick_device(recipe.cluster.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    worker = ModelWorker(recipe, topology, rank, device, make_meshes(topology, device.type))

    def failure(error: BaseException) -> Failure:
        traceback.print_exc()
        return Failure.of(error, f"rank {rank} pid {os.getpid()}", traceback.format_exc())

    serve(run_dir, rank, worker.handle, failure)
    worker.meshes.clear()
    del worker
    gc.collect()  # what holds the process group goes before it does
    dist.barrier()
    dist.destroy_process_group()


def _log_to(path: Path) -> None:
    """Everything that this process prints, libraries included, goes to its own file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())


def _die_with_parent() -> None:
    """SIGKILL when torchrun is gone; torchrun itself dies with the master."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
