"""Connections between the master and the processes of a run: who may connect, and where.

There are two sockets: for requests and replies, and for heartbeats and the store through which
ranks find each other (see `pulse` and `store`). On one node they are Unix sockets in a folder that
only its owner may enter; between nodes they use TCP on one interface. Either way a peer must know
the master's CURVE key, generated for this run, to be understood at all, and must prove that it has
the run's client key before the master keeps more than one frame of it. Addresses, keys and token
reach the processes in a file that only their owner can read,
never through a command line or the environment.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from rlcli.errors import HangError, ResourceError
from rlcli.files import replace_file
from rlcli.messaging.messages import FRAME

CONTROL_FILE = "control.json"
SOCKET = "control"
"""Name of the Unix socket for requests; `launch.meeting` keeps its path within the length limit of
socket addresses."""
PULSES = "pulses"
"""Name of the Unix socket for heartbeats and the store."""

ENCRYPTION = 1 << 10
"""Bytes that encryption may add to a frame."""
HANDSHAKE_WITHIN = 10_000
"""Milliseconds after which a connection whose peer has not proved anything is closed."""
ZAP = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a client's key is one of ours."""


@dataclass(frozen=True)
class Control:
    """What a process of a run must know to connect to the master."""

    requests: str
    """Address of the socket for requests and replies."""
    pulses: str
    """Address of the socket for heartbeats and the store."""
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
    def wait_for(
        cls, folder: Path, deadline: float, is_valid: Callable[[Control], bool] = lambda _: True
    ) -> Control:
        """The control data of a master that may not have started yet; `is_valid`: whether they are
        not those of an earlier one. Raises HangError after `deadline` seconds."""
        end = time.monotonic() + deadline
        while (control := cls._read_if_written(folder)) is None or not is_valid(control):
            if time.monotonic() > end:
                message = f"no run has begun in {folder.parent} within {deadline:.0f} s"
                raise HangError(
                    message, hint="start its first node; both must see the same run folder"
                )
            time.sleep(0.2)
        return control

    @classmethod
    def _read_if_written(cls, folder: Path) -> Control | None:
        try:
            return cls.read(folder)
        except FileNotFoundError:
            return None

    def write(self, folder: Path) -> None:
        """Write the file atomically, so that nobody reads half of it."""
        replace_file(
            folder / CONTROL_FILE, json.dumps(asdict(self) | {"token": self.token.hex()}).encode()
        )

    def connect(self, context: Any, address: str) -> Any:
        """A socket of a process of the run."""
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
    doorkeeper: Any
    """Socket on which libzmq asks about clients; `Control` says which are ours."""
    control: Control

    def close(self) -> None:
        for socket in (self.requests, self.pulses, self.doorkeeper):
            socket.close()


def listen(context: Any, folder: Path, host: str | None) -> Listening:
    """Open the master's sockets: in the folder, or on the host's address. The folder gets what a
    process must know.

    Raises ResourceError if this ZeroMQ was built without CURVE or the address cannot be listened
    on.
    """
    if not zmq.has("curve"):
        raise ResourceError(
            "this pyzmq was built without CURVE", hint="pip install --force-reinstall pyzmq"
        )
    public, secret = zmq.curve_keypair()
    doorkeeper = _doorkeeper(context)  # before any socket accepts connections
    requests, pulses = _router(context, secret), _router(context, secret)
    try:
        for socket, name in ((requests, SOCKET), (pulses, PULSES)):
            socket.bind(f"ipc://{folder / name}" if host is None else f"tcp://{host}:*")
    except zmq.ZMQError as error:
        for socket in (doorkeeper, requests, pulses):
            socket.close()
        message = f"cannot listen on {host or folder}: {error}"
        raise ResourceError(
            message, hint="launch.interface names the network interface", code="F58"
        ) from error
    control = _control(requests, pulses, public.decode())
    control.write(folder)
    return Listening(requests, pulses, doorkeeper, control)


def _control(requests: Any, pulses: Any, key: str) -> Control:
    """What processes must know of the master's sockets, with a new client key and token."""
    client, secret = (pair.decode() for pair in zmq.curve_keypair())
    return Control(
        requests=requests.getsockopt_string(zmq.LAST_ENDPOINT),
        pulses=pulses.getsockopt_string(zmq.LAST_ENDPOINT),
        key=key,
        client=client,
        secret=secret,
        token=secrets.token_bytes(32),
    )


def _doorkeeper(context: Any) -> Any:
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(ZAP)
    return socket


def answer_doorkeeper(listening: Listening) -> None:
    """Accept or reject a client by its key (ZeroMQ's protocol for this is RFC 27, ZAP)."""
    version, sequence, _, _, _, mechanism, *credentials = listening.doorkeeper.recv_multipart()
    ours = z85.decode(listening.control.client.encode())
    is_ours = (
        mechanism == b"CURVE"
        and len(credentials) == 1
        and hmac.compare_digest(credentials[0], ours)
    )
    verdict = (b"200", b"OK") if is_ours else (b"400", b"unknown key")
    listening.doorkeeper.send_multipart([version, sequence, *verdict, b"", b""])


def _router(context: Any, secret: bytes) -> Any:
    """A socket of the master, whose peers must know the public key of this secret one."""
    socket = _new_socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.curve_server = True
    socket.curve_secretkey = secret
    return socket


def _new_socket(context: Any, kind: int) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME + ENCRYPTION)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_WITHIN)
    return socket
