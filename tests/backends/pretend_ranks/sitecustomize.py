"""Gives each rank of a run a pretend CUDA device, by gloo in place of NCCL: for runs with this
folder on PYTHONPATH.

Python imports a file of this name when it starts. Neither the ranks' code nor what starts them
knows of it.
"""

import os
import sys
from pathlib import Path

FAKES = Path(__file__).resolve().parents[2] / "fakes"


def pretend(ranks: int):
    """For the rest of this process, which is one of `ranks`."""
    import torch.distributed as dist

    sys.path.append(str(FAKES))
    from pretend_cuda import pretend_cuda

    begin = dist.init_process_group

    def by_gloo(backend, *args, **kwargs):
        assert backend == "nccl"
        return begin("gloo", *args, **kwargs)

    dist.init_process_group = by_gloo
    devices = pretend_cuda(devices=ranks)
    devices.__enter__()
    return devices


if "RLCLI_MEETING" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
    DEVICES = pretend(int(os.environ["LOCAL_WORLD_SIZE"]))
