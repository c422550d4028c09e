"""What a rank does besides computing: lanes, each a thread that answers requests of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlcli.recipe.schema import Recipe
from rlcli.runtime.messages import END_LANE, MOVES, Failure, Request
from rlcli.runtime.transport import ZmqWorker
from rlcli.topology import Topology
from rlcli.topology.groups import pool_name, pooled_roles


def lanes_of(recipe: Recipe, topology: Topology) -> dict[str, tuple[int, ...]]:
    """Lane → the ranks that have it. A pool has one on each rank of its role, so that its calls block no other work."""
    moves = {MOVES: tuple(range(topology.world_size))} if topology.world_size > 1 else {}
    return moves | {pool_name(role): topology.placement(role).ranks for role in pooled_roles(recipe)}


def start_lane(
    lane: str, handle: Callable[[Request], dict[str, Any]], failure: Callable[[BaseException], Failure],
    main: ZmqWorker, folder: Path, rank: int,
) -> threading.Thread:  # fmt: skip
    """Serve the master's requests to a lane until the last one."""

    def serve() -> None:
        link = ZmqWorker(folder, rank, main=main)
        link.serve(handle, failure, until=END_LANE, lane=lane)
        link.close()

    thread = threading.Thread(target=serve, name=lane, daemon=True)
    thread.start()
    return thread
