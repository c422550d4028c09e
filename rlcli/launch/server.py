"""The agent of one server: `python -P -m rlcli.launch.server FOLDER`. It runs what the client
requests in that folder (see `server_slot`), one server at a time; the server ends with the agent,
however the agent ends."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from rlcli.api.network import free_port
from rlcli.launch.server_process import ServerProcess
from rlcli.server_slot import LOST, PORT, ServerRequest, ServerSlot, Serves

LOOK_EVERY = 0.2
"""Seconds between two checks of what is wanted and whether it is running."""


def main(folder: Path) -> None:
    """Run until this process is ended."""
    agent = ServerAgent(ServerSlot(folder))
    while True:
        agent.look()
        time.sleep(LOOK_EVERY)


def agent_command(folder: Path) -> list[str]:
    """The command that starts the agent of a server."""
    return [sys.executable, "-P", "-m", "rlcli.launch.server", str(folder.absolute())]


class ServerAgent:
    """Keeps one server as its client wants it."""

    def __init__(self, slot: ServerSlot):
        self._slot = slot
        self._server: ServerProcess | None = None
        self._serves = Serves(0, 0)
        earlier = slot.serves
        if earlier is not None:  # from a previous agent: its server has died with it
            self._say(replace(earlier, exit=LOST if earlier.exit is None else earlier.exit))

    def look(self) -> None:
        """Start or stop the server as needed, and report how it ended."""
        request = self._slot.request
        if self._server is not None and (code := self._server.exit_code) is not None:
            self._server = None
            self._say(replace(self._serves, exit=code))
        if self._server is not None and (peer := self._ended_peer(request)) is not None:
            self.stop()
            self._say(replace(self._serves, exit=peer.exit_code, ended_with=peer.folder.name))
        if request.life > self._serves.life:
            self.stop()
            self._say(self._start(request))

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _ended_peer(self, request: ServerRequest) -> ServerSlot | None:
        """A process of the same server on another node that has ended,
        other than with one of the others."""
        if request.life != self._serves.life:  # it is about to be ended anyway
            return None
        peers = (ServerSlot(Path(folder)) for folder in request.peers)
        return next(
            (peer for peer in peers if peer.life == request.life and peer.ended_first), None
        )

    def _start(self, request: ServerRequest) -> Serves:
        last = self._serves
        if not request.command:
            return replace(last, life=request.life, port=0, exit=0, ended_with=None)
        port = free_port()
        command = [word.replace(PORT, str(port)) for word in request.command]
        self._server = ServerProcess(command, self._slot.log, request.environment)
        return Serves(
            request.life,
            port,
            starts=last.starts + 1,
            before=last.how_it_ended if last.starts else "",
        )

    def _say(self, serves: Serves) -> None:
        self._serves = serves
        self._slot.tell(serves)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
