"""The connection between master and workers: one socket, encrypted with a key of the run, and a token.

On one machine it is a Unix socket in a folder that only its owner may enter. A peer must know the master's CURVE key,
made for this run; until it has proved that, at most one of its frames is kept in memory. Address, key and token reach
the workers in a file of that folder, never by a command line or the environment.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli.errors import ResourceError
from rlcli.files import open_private
from rlcli.runtime.messages import LARGEST, ProtocolError

CONTROL_FILE = "control.json"
SOCKET = "control"
"""Name of the Unix socket; `launch.meeting` keeps its path within what a socket's address can hold."""

FRAME = 1 << 18
"""Bytes of a frame. A message takes as many as it needs; of a peer that has not proved that it knows the key, no more
than one is held in memory."""
ENCRYPTION = 1 << 10
"""Bytes that encryption may add to a frame."""


@dataclass(frozen=True)
class Control:
    """What a worker must know to speak with the master."""

    address: str
    key: str
    """The master's public CURVE key, which serves as a secret: it is given to the run's workers only."""
    token: bytes

    @classmethod
    def read(cls, folder: Path) -> Control:
        fields = json.loads((folder / CONTROL_FILE).read_text())
        return cls(fields["address"], fields["key"], bytes.fromhex(fields["token"]))

    def write(self, folder: Path) -> None:
        descriptor = open_private(folder / CONTROL_FILE, os.O_WRONLY | os.O_EXCL)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"address": self.address, "key": self.key, "token": self.token.hex()}, file)

    def connect(self, context: Any) -> Any:
        """A worker's socket."""
        zmq = zeromq()

        socket = _new_socket(context, zmq.DEALER)
        socket.curve_serverkey = self.key.encode()
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(self.address)
        return socket


def listen(context: Any, folder: Path) -> tuple[Any, Control]:
    """The master's socket, and what a worker must know, which is also written into the folder.

    Raises ResourceError if the ZeroMQ here was built without CURVE.
    """
    zmq = zeromq()

    if not zmq.has("curve"):
        raise ResourceError("this pyzmq was built without CURVE", hint="pip install --force-reinstall pyzmq")
    public, secret = zmq.curve_keypair()
    socket = _new_socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.curve_server = True
    socket.curve_secretkey = secret
    control = Control(f"ipc://{folder / SOCKET}", public.decode(), secrets.token_bytes(32))
    socket.bind(control.address)
    control.write(folder)
    return socket, control


def split(message: bytes) -> list[bytes]:
    """A message as frames."""
    return [message[start : start + FRAME] for start in range(0, len(message), FRAME)]


def join(frames: Sequence[bytes]) -> bytes:
    """The message in frames. Raises ProtocolError if it is too long to be one."""
    size = sum(map(len, frames))
    if size > LARGEST:
        raise ProtocolError(f"a message of {size} bytes; at most {LARGEST} are read")
    return b"".join(frames)


def _new_socket(context: Any, kind: int) -> Any:
    zmq = zeromq()

    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME + ENCRYPTION)
    return socket


def zeromq() -> Any:
    """The module, untyped: its constants are made at run time."""
    import zmq

    return zmq
