"""Uses the network, and declares that."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.environment import Environment, register_environment


@dataclass(kw_only=True)
class Online(Environment):
    """Says whether there is a network, without sending anything."""

    NETWORK: ClassVar[bool] = True

    def has_route(self) -> str:
        """Whether a server can be reached."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
            try:
                connection.connect(("192.0.2.1", 9))
            except OSError:
                return "no"
            return "yes"


register_environment("online", Online)
