"""The network interfaces and ports of this machine, and the ways to others."""

from __future__ import annotations

import ipaddress
import random
import socket
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from rlcli.errors import ResourceError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""The interface that only processes of the same machine reach."""
PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports from which Linux takes those of connections, and of sockets that name none."""
CANDIDATES = range(10_000, 32_768)
"""Above well-known services, and below what systems give to connections by default."""
PROBES = 100


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


def free_port(address: str = "127.0.0.1") -> int:
    """A port that is free now, and that the system does not give to connections: a server may
    listen on it only after seconds of loading. Where there is none, any free port."""
    taken_by_connections = _ports_of_connections()
    candidates = [port for port in CANDIDATES if port not in taken_by_connections]
    system = random.SystemRandom()  # runs count what is drawn from the usual generator
    for port in system.sample(candidates, min(PROBES, len(candidates))):
        with suppress(OSError), socket.create_server((address, port)):
            return port
    with socket.create_server((address, 0)) as probe:
        return int(probe.getsockname()[1])


def _ports_of_connections() -> range:
    try:
        first, last = map(int, PORTS_OF_CONNECTIONS.read_text().split())
    except (OSError, ValueError):
        return range(0)
    return range(first, last + 1)


def demand_private_way(url: str, secret: str) -> None:
    """Raises ValueError if others may read what is sent to a URL, such as a token: it is plain
    http, to another machine."""
    parts = urlsplit(url)
    if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        raise ValueError(
            f"url is {url!r}; a {secret} is only sent over https, except to this machine"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
