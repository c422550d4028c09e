"""The network interfaces of this machine."""

from __future__ import annotations

import socket
import sys

from rlcli.errors import ResourceError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The interface that only processes of the same machine reach."""


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface. Raises ResourceError F58."""
    import psutil

    addresses = psutil.net_if_addrs()
    for address in addresses.get(interface, ()):
        if address.family == socket.AF_INET:
            return str(address.address)
    message = f"there is no network interface {interface!r} with an IPv4 address here"
    hint = f"it is one of {', '.join(sorted(addresses))}"
    raise ResourceError(message, where="launch.interface", hint=hint, code="F58")
