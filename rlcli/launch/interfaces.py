"""The network interfaces of this machine."""

from __future__ import annotations

import socket

from rlcli.errors import ResourceError


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface. Raises ResourceError F58."""
    import psutil

    known = psutil.net_if_addrs()
    for one in known.get(interface, ()):
        if one.family == socket.AF_INET:
            return str(one.address)
    what = f"there is no network interface {interface!r} with an IPv4 address here"
    raise ResourceError(what, where="launch.interface", hint=f"it is one of {', '.join(sorted(known))}", code="F58")
