"""Connections between the master and the processes of a run: who may connect, where,
and how many there may be.

There are three sockets: for requests and replies, for heartbeats, and for the store through which
ranks find each other (see `pulse` and `store`). On one node they are Unix sockets in a folder that
only its owner may enter; between nodes they use TCP on one interface. Either way a peer must know
the master's CURVE key, generated for this run, to be understood at all, and must prove that it has
the run's client key before the master keeps more than one frame of it. Addresses, keys and token
reach the processes in a file that only their owner can read,
never through a command line or the environment.

Every connection takes a descriptor. The limit on open files is raised as far as the system permits,
and compared with what a run needs before it starts: a process that has none left fails in odd ways.
ZeroMQ stops accepting connections, and gloo aborts.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import resource
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlcli.errors import HangError, ResourceError
from rlcli.files import replace_file
from rlcli.runtime.messages import FRAME

CONTROL_FILE = "control.json"
SOCKET = "control"
"""Name of the Unix socket for requests; `launch.meeting` keeps its path within the length limit of
socket addresses."""
PULSES = "pulses"
"""Name of the Unix socket for heartbeats."""
STORE = "store"
"""Name of the Unix socket for the store."""

ENCRYPTION = 1 << 10
"""Bytes that encryption may add to a frame."""
HANDSHAKE_WITHIN = 10_000
"""Milliseconds after which a connection whose peer has not proved anything is closed."""
ZAP = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a client's key is one of ours."""

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


@dataclass(frozen=True)
class Control:
    """What a process of a run must know to connect to the master."""

    requests: str
    """Address of the socket for requests and replies."""
    pulses: str
    """Address of the socket for heartbeats."""
    store: str
    """Address of the socket for the store."""
    key: str
    """The master's public CURVE key, which is kept secret too: only the run's processes get it."""
    client: str
    """Public key of the clients, the same for all."""
    secret: str
    """Secret key of the clients."""
    token: bytes
    """Token included in every message."""

    @property
    def is_remote(self) -> bool:
        """Whether there are processes on other nodes,
        which do not automatically end with the master."""
        return self.requests.startswith("tcp://")

    @classmethod
    def read(cls, folder: Path) -> Control:
        fields = json.loads((folder / CONTROL_FILE).read_text())
        return cls(**fields | {"token": bytes.fromhex(fields["token"])})

    @classmethod
    def wait_for(cls, folder: Path, deadline: float) -> Control:
        """The control data of a master that may not have started yet. Raises HangError after
        `deadline` seconds."""
        end = time.monotonic() + deadline
        while not (folder / CONTROL_FILE).is_file():
            if time.monotonic() > end:
                message = f"no run has begun in {folder.parent} within {deadline:.0f} s"
                raise HangError(
                    message, hint="start its first node; both must see the same run folder"
                )
            time.sleep(0.2)
        return cls.read(folder)

    def write(self, folder: Path) -> None:
        """Write the file atomically, so that nobody reads half of it."""
        replace_file(
            folder / CONTROL_FILE, json.dumps(asdict(self) | {"token": self.token.hex()}).encode()
        )

    def connect(self, context: Any, address: str) -> Any:
        """A socket of a process of the run."""
        zmq = zeromq()

        socket = _new_socket(context, zmq.DEALER)
        socket.curve_serverkey = self.key.encode()
        socket.curve_publickey, socket.curve_secretkey = self.client.encode(), self.secret.encode()
        socket.connect(address)
        return socket


@dataclass(frozen=True)
class Listening:
    """The master's sockets."""

    requests: Any
    pulses: Any
    store: Any
    doorkeeper: Any
    """Socket on which libzmq asks about clients; `Control` says which are ours."""
    control: Control

    def close(self) -> None:
        for socket in (self.requests, self.pulses, self.store, self.doorkeeper):
            socket.close()


def listen(context: Any, folder: Path, host: str | None) -> Listening:
    """Open the master's sockets: in the folder, or on the host's address. The folder gets what a
    process must know.

    Raises ResourceError if this ZeroMQ was built without CURVE or the address cannot be listened
    on.
    """
    zmq = zeromq()

    if not zmq.has("curve"):
        raise ResourceError(
            "this pyzmq was built without CURVE", hint="pip install --force-reinstall pyzmq"
        )
    public, secret = zmq.curve_keypair()
    doorkeeper = context.socket(zmq.REP)
    doorkeeper.setsockopt(zmq.LINGER, 0)
    doorkeeper.bind(ZAP)  # before any socket accepts connections
    sockets, addresses = [doorkeeper], []
    try:
        for name in (SOCKET, PULSES, STORE):
            socket = _new_socket(context, zmq.ROUTER)
            sockets.append(socket)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.curve_server = True
            socket.curve_secretkey = secret
            socket.bind(f"ipc://{folder / name}" if host is None else f"tcp://{host}:*")
            addresses.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    except zmq.ZMQError as error:
        for socket in sockets:
            socket.close()
        message = f"cannot listen on {host or folder}: {error}"
        raise ResourceError(
            message, hint="launch.interface names the network interface", code="F58"
        ) from error
    client, client_secret = (key.decode() for key in zmq.curve_keypair())
    requests, pulses, store = addresses
    control = Control(
        requests, pulses, store, public.decode(), client, client_secret, secrets.token_bytes(32)
    )
    control.write(folder)
    return Listening(sockets[1], sockets[2], sockets[3], doorkeeper, control)


def answer_doorkeeper(listening: Listening) -> None:
    """Accept or reject a client by its key (ZeroMQ's protocol for this is RFC 27, ZAP)."""
    zmq = zeromq()

    version, sequence, _, _, _, mechanism, *credentials = listening.doorkeeper.recv_multipart()
    ours = zmq.utils.z85.decode(listening.control.client.encode())
    is_ours = (
        mechanism == b"CURVE"
        and len(credentials) == 1
        and hmac.compare_digest(credentials[0], ours)
    )
    verdict = (b"200", b"OK") if is_ours else (b"400", b"unknown key")
    listening.doorkeeper.send_multipart([version, sequence, *verdict, b"", b""])


def _new_socket(context: Any, kind: int) -> Any:
    zmq = zeromq()

    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME + ENCRYPTION)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_WITHIN)
    return socket


def zeromq() -> Any:
    """The module, untyped: its constants are created at run time."""
    import zmq
    import zmq.utils.z85

    return zmq


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
