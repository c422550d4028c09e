"""The network interface through which the nodes of a run reach each other."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.api.network import LOOPBACK
from rlcli.errors import ResourceError

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe

ROUTES = Path("/proc/net/route")


def interface_of(recipe: Recipe) -> str:
    """The network interface of this machine through which the nodes of a run reach each other.
    Raises ResourceError F58 if there is none."""
    if recipe.launch.interface is not None:
        return recipe.launch.interface
    is_spread = recipe.launch.type == "slurm" and recipe.cluster.nodes > 1
    return _default_interface() if is_spread else LOOPBACK


def _default_interface() -> str:
    """The interface of the default route; without one, the first that has an address and is not the
    loopback, through which no other machine is reached. Raises ResourceError F58."""
    import psutil

    try:
        routes = [line.split() for line in ROUTES.read_text().splitlines()[1:]]
    except OSError:
        routes = []
    ways = [route[0] for route in routes if len(route) > 1 and route[1] == "00000000"]
    others = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if name != LOOPBACK and any(address.family == socket.AF_INET for address in addresses)
    ]
    if not (ways or others):
        message = f"no network interface here but {LOOPBACK} has an IPv4 address"
        hint = "the nodes of a run reach each other by IPv4; cluster.nodes=1 needs no network"
        raise ResourceError(message, where="launch.interface", hint=hint, code="F58")
    return [*ways, *others][0]
