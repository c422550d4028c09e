"""A server of a run: a folder through which its client and its agent communicate.

The client is a rank. It requests a server, and requests it again if the server has died: only the
client knows what arguments the server then needs, and how many restarts are enough. The agent, on
the same node (`launch.server`), runs it and reports where it listens and how it ended. Files are
replaced whole, so nobody reads half of one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rlcli.files import known_object, replace_file
from rlcli.processes import ended_how

WANTED, SERVES, LOG = "wanted.json", "serves.json", "server.log"
LOST = 137
"""Exit code of a server whose agent has died."""
PORT = "{port}"
"""Placeholder in a command for the port on which the server should listen."""
LOG_LINES = 12
"""Last lines of a server's log that an error shows."""
LOG_BYTES = 4096


@dataclass(frozen=True)
class ServerRequest:
    """What the client requests."""

    life: int
    """A number higher than before requests a new process."""
    command: tuple[str, ...] = ()
    """Empty if no server should run."""
    environment: Mapping[str, str] = field(default_factory=dict)
    peers: tuple[str, ...] = ()
    """Folders of the server's other processes, on other nodes:
    this one ends when one of them has ended."""


@dataclass(frozen=True)
class Serves:
    """What the agent reports."""

    life: int
    port: int
    exit: int | None = None
    """Exit code of a server that has ended; negative for the signal that ended it."""
    ended_with: str | None = None
    """Name of the server's process on another node that ended first, and with that exit code; None
    if this one did."""
    given_up: str | None = None
    """Why there is no agent any more: nothing will be started here again."""
    starts: int = 0
    """How many servers were started here."""
    before: str = ""
    """How the server before this one ended, to follow its name; empty if there was none."""

    @property
    def how_it_ended(self) -> str:
        """How the server ended, or why its client has it ended, to follow its name."""
        if self.exit is None:
            return "did not answer"
        how = "ended with the agent that ran it" if self.exit == LOST else ended_how(self.exit)
        return how if self.ended_with is None else f"ended with {self.ended_with}, which {how}"


class ServerSlot:
    """The client's end and the agent's."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.life = self.request.life
        """Number of the last requested server."""

    # -- the client's ------------------------------------------------------------------------------

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], peers: Sequence[Path] = ()
    ) -> None:
        """Have a new server started, once the old one has been ended. `environment`: its variables
        in addition to those of the run; `peers`: folders of its other processes, which must be
        started equally often."""
        self._request(tuple(command), environment, tuple(map(str, peers)))

    def stop(self) -> None:
        """Have the server ended."""
        self._request((), {}, ())

    def _request(
        self, command: tuple[str, ...], environment: Mapping[str, str], peers: tuple[str, ...]
    ) -> None:
        self.life += 1
        request = ServerRequest(self.life, command, environment, peers)
        replace_file(self.folder / WANTED, json.dumps(asdict(request)).encode())

    @property
    def port(self) -> int | None:
        """Where the last requested server listens, or will soon; None until it is started."""
        reported = self.serves
        return (
            reported.port
            if reported is not None and reported.life == self.life and reported.given_up is None
            else None
        )

    @property
    def exit_code(self) -> int | None:
        """Exit code of the last requested server; None while it runs."""
        reported = self.serves
        if reported is not None and reported.given_up is not None:
            return LOST
        return reported.exit if reported is not None and reported.life == self.life else None

    @property
    def ended_first(self) -> bool:
        """Whether the last requested server has ended, and not because one of its other processes
        had."""
        reported = self.serves
        return self.exit_code is not None and (reported is None or reported.ended_with is None)

    @property
    def given_up(self) -> str | None:
        """Why no server will be started here any more; None if one may be."""
        return reported.given_up if (reported := self.serves) is not None else None

    @property
    def log(self) -> Path:
        return self.folder / LOG

    def last_words(self) -> str:
        """The end of the server's log."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return "\n".join(line for line in lines[-LOG_LINES:] if line.strip())
        return ""

    # -- the agent's -------------------------------------------------------------------------------

    @property
    def request(self) -> ServerRequest:
        content = known_object(self.folder / WANTED)
        return (
            ServerRequest(
                content["life"],
                tuple(content["command"]),
                content["environment"],
                tuple(content["peers"]),
            )
            if content
            else ServerRequest(0)
        )

    @property
    def serves(self) -> Serves | None:
        content = known_object(self.folder / SERVES)
        return Serves(**content) if content else None

    def give_up(self, why: str) -> None:
        """Record that there will be no agent any more; called by its starter once it has died too
        often."""
        self.tell(replace(self.serves or Serves(0, 0), given_up=why))

    def tell(self, serves: Serves) -> None:
        replace_file(self.folder / SERVES, json.dumps(asdict(serves)).encode())
