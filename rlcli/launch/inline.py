"""Everything in this process: the worker's answers are plain calls, so a debugger can follow them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rlcli.launch import lifeline
from rlcli.launch.cores import available_cores

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe
    from rlcli.runtime.transport import Transport
    from rlcli.topology import Topology


def start_inline(recipe: Recipe, topology: Topology) -> Transport:
    """A worker for rank 0, here."""
    import torch

    from rlcli.runtime.roles import pick_device
    from rlcli.runtime.transport import InlineTransport
    from rlcli.runtime.worker import ModelWorker

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(available_cores())
    transport = InlineTransport(lambda request: worker.handle(request), lifeline.waiting)
    worker = ModelWorker(recipe, topology, 0, pick_device(recipe.cluster.device, 0), {}, transport.report)
    return transport
