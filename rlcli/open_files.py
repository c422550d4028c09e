"""How many files and connections a process of a run may open.

Every connection takes a descriptor. The limit on open files is raised as far as the system permits,
and compared with what a run needs before it starts: a process that has none left fails in odd ways.
ZeroMQ stops accepting connections, and gloo aborts.
"""

from __future__ import annotations

import errno
import os
import resource

from rlcli.errors import ResourceError

HIGHEST = 1 << 20
"""The limit is not raised beyond this. Some systems allow a thousand million, and programs that
close every descriptor that they might have would then take minutes."""
OF_A_PROCESS = 96
"""Descriptors of a process apart from its connections: files, libraries, devices, and whatever a
component opens."""
OF_A_CONNECTED_AGENT = 2
"""Connections of an agent to the master: heartbeats, store."""
OF_A_CONNECTED_RANK = 4
"""Connections of a rank to the master: requests, heartbeats, store, and a report now and then."""
PER_PEER = 2
"""Connections between two ranks: one of the compute group, one of the data lane.
Both are made when first used."""
SPARE = 8
"""With fewer descriptors left, a process counts as having none."""
TOO_MANY = os.strerror(errno.EMFILE)
"""What the system says when a process has none left."""


def raise_limit() -> int:
    """Raise the soft limit of this process, and of those that it will start, to the hard limit.
    Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = HIGHEST if hard == resource.RLIM_INFINITY else min(hard, HIGHEST)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return HIGHEST if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except ValueError:  # a system may permit fewer than its hard limit says
        return soft
    return allowed


def has_none_left() -> bool:
    """Whether this process has used up its descriptors."""
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # listing them takes one
        return True
    return used + SPARE > resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0


def needed_by_master(nodes: int, world_size: int, lanes: int) -> int:
    """Descriptors of the master of a run whose ranks are other processes,
    with this many lanes in all."""
    return OF_A_PROCESS + OF_A_CONNECTED_AGENT * nodes + OF_A_CONNECTED_RANK * world_size + lanes


def needed_by_rank(world_size: int) -> int:
    """Descriptors of a rank that exchanges tensors with all others."""
    return OF_A_PROCESS + PER_PEER * world_size


def too_few(limit: int, needed: int, who: str, where: str | None = None) -> ResourceError:
    """The error for a process that may not open as many files as it needs."""
    message = f"{who} may open {limit} files (ulimit -n), and needs {needed} in this run"
    hint = (
        f"raise the hard limit there to at least {needed}: /etc/security/limits.conf, or "
        "LimitNOFILE= of a service"
    )
    return ResourceError(message, where=where, hint=hint, code="F61")


def none_left(who: str, during: str) -> ResourceError:
    """The error for a process that has used up its descriptors."""
    message = f"{who} may open {raise_limit()} files (ulimit -n), and has none left: {during}"
    return ResourceError(message, hint="raise the hard limit there", code="F61")
