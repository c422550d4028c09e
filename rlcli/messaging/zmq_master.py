"""The master's socket: it sends requests, reads replies and reports, and notices when a rank hangs,
dies or loses its connection."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from rlcli.api.headway import Headway
from rlcli.errors import HangError, RlcliError, WorkerError
from rlcli.messaging.control import CONTROL_FILE, listen
from rlcli.messaging.messages import (
    COMPUTE,
    HELLO,
    LARGEST,
    LAST_REQUEST,
    Listener,
    ProtocolError,
    Reply,
    Report,
    Request,
    pack,
    split,
    unpack,
)
from rlcli.messaging.pulse import BEAT_SECONDS, LOST_AFTER, Peer, Pulses
from rlcli.messaging.transport import CHECK_SECONDS, ignore
from rlcli.open_files import has_none_left, none_left
from rlcli.processes import OwnPauses

log = logging.getLogger(__name__)


SILENT = 10.0
"""Seconds without a heartbeat after which a rank is named as the one that hangs."""


LONGEST_SILENCE = 300.0
"""Seconds without a heartbeat after which a rank counts as hanging,
whatever the other deadlines are."""


FIND_CULPRIT_WITHIN = 5.0
"""Seconds to find out whether an unexpected error of one rank is a consequence of another rank's
death."""


MISSED = 3 * BEAT_SECONDS
"""Seconds of silence after which a rank is suspected of having died."""


class ZmqMaster:
    """The master's socket. `is_alive` raises when processes of the run have ended, or have been
    silent on another node for longer than the given seconds."""

    def __init__(
        self,
        folder: Path,
        world_size: int,
        is_alive: Callable[[float], None],
        host: str | None = None,
        most: int = LARGEST,
    ):
        """Listen on the host's address, or else in a private folder; in either case the folder has
        what the workers need in order to connect. `most`: maximum bytes of a message."""
        self._context = zmq.Context()
        try:
            self._listening = listen(self._context, folder, host)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._socket, self._token = self._listening.requests, self._listening.control.token
        self.pulses = Pulses(self._listening)
        self.on_report: Listener = ignore
        self._is_alive = is_alive
        self._world_size = world_size
        self._most = most
        self._identities: dict[tuple[int, str], bytes] = {}
        """Rank and lane → the identity that answers."""
        self._expected = {(rank, COMPUTE) for rank in range(world_size)}
        """All ranks and lanes, whether up or not; a rank reports which lanes it has."""
        self._pauses = OwnPauses()
        self._listening_since = self._checked = time.monotonic()
        """Since when the master listens, and when the processes were last checked."""
        self._paused = 0.0
        """Total seconds of the master's own pauses."""
        self.pids: dict[int, int] = {}
        """Rank → its process id."""
        self.has_let_go = False
        """The workers were asked to shut down: they may end."""
        self.rejected = 0
        """Messages discarded because they were not from one of our workers."""
        self._control = folder / CONTROL_FILE

    def wait_for_workers(self, deadline: float) -> None:
        """Wait until every rank has said hello. Raises the error of a rank that cannot start, and
        ResourceError F61 if there were no descriptors left for its connections."""
        end = time.monotonic() + deadline
        work, is_up = Headway(self._world_size, "ranks"), 0
        while missing := sorted({rank for rank, _ in self._expected - {*self._identities}}):
            work.advance(self._world_size - len(missing) - is_up)
            is_up = self._world_size - len(missing)
            late = f"rank {missing[0]} to start ({len(missing)} of {self._world_size} are missing)"
            try:
                message = self._next(
                    end - time.monotonic(), late, deadline, "launch.startup_deadline"
                )
            except HangError as error:
                if has_none_left():
                    raise none_left("the master", error.what) from error
                raise
            if message.failure is not None:
                raise message.failure.as_error()

    def send(self, rank: int, request: Request, limit: float = 0.0) -> None:
        self.has_let_go = self.has_let_go or request.op == LAST_REQUEST
        message = pack(request, self._token)
        if len(message) > self._most:
            raise RlcliError(
                f"request {request.op} takes {len(message)} bytes; at most {self._most} can be sent"
            )
        try:
            self._socket.send_multipart([self._identities[rank, request.lane], *split(message)])
        except zmq.ZMQError as error:
            self._await_death()
            raise self._lost_connection(rank) from error

    def receive(
        self, deadline: float, waiting_for: str, limit: float | None = None
    ) -> Reply | None:
        message = self._next(deadline, waiting_for, limit)
        if isinstance(message, Reply):
            return message
        self.on_report(message)
        return None

    def clock(self) -> float:
        self._own_pause()
        return time.monotonic() - self._paused

    def _next(
        self,
        deadline: float,
        waiting_for: str,
        limit: float | None = None,
        key: str = "launch.step_deadline",
    ) -> Reply | Report:
        self._own_pause()
        if time.monotonic() - self._checked > CHECK_SECONDS and not self._socket.poll(timeout=0):
            self._check_processes()  # a busy run is never idle
        end = time.monotonic() + deadline
        while True:
            has_message = self._socket.poll(timeout=200)
            end += self._own_pause()
            message = self._read() if has_message else None
            if (
                isinstance(message, Reply)
                and message.failure is not None
                and message.failure.is_unexpected
            ):
                self._await_death()
            if message is not None:
                return message
            if not has_message:  # first read what a rank sent before it died
                self._check_processes()
            self._check_clocks(end, deadline if limit is None else limit, waiting_for, key)

    def _check_processes(self) -> None:
        """Raise WorkerError if processes have ended, or have lost their connection to us: requests
        or replies may be lost."""
        self._is_alive(LOST_AFTER)
        for (kind, rank), facts in list(self.pulses.facts.items()):
            if kind == "rank" and facts.get("has_lost_connection") and not self.has_let_go:
                raise self._lost_connection(rank)
        self._checked = time.monotonic()

    def _own_pause(self) -> float:
        """Seconds in which the master did not listen. They count against no rank: its heartbeats
        are waiting to be read, or it was stopped as the master was."""
        seconds = self._pauses.since_last_look()
        if seconds:
            self._listening_since = time.monotonic()
            self._paused += seconds
        return seconds

    def _read(self) -> Reply | Report | None:
        """The message that has arrived; None if it is not from our workers."""
        identity, *frames = self._socket.recv_multipart()
        try:
            message: Reply | Report = unpack(frames, self._token, Reply, Report, most=self._most)
            if message.rank >= self._world_size:
                raise ProtocolError(f"there is no rank {message.rank}")
        except ProtocolError as error:
            self.rejected += 1
            log.warning("a message on the control socket was discarded: %s", error)
            return None
        if isinstance(message, Report) and message.name == HELLO:
            self._identities[message.rank, message.value.get("lane", COMPUTE)] = identity
            self.pids[message.rank] = int(message.value.get("pid", 0))
            self._expected |= {(message.rank, lane) for lane in message.value.get("lanes", ())}
        return message

    def silences(self) -> dict[Peer, float]:
        """Seconds since each process was last heard, excluding times in which the master did not
        listen."""
        now = time.monotonic()
        return {
            peer: now - max(heard, self._listening_since)
            for peer, heard in sorted(self.pulses.heard.items())
        }

    def _lost_connection(self, rank: int) -> WorkerError:
        message = f"the connection between the master and rank {rank} was lost"
        hint = "the network between the nodes, or a firewall, has closed it"
        return WorkerError(message, where=self._name(rank), hint=hint, code="F08")

    def _name(self, rank: int) -> str:
        return f"rank {rank} pid {self.pids.get(rank)}"

    def _check_clocks(self, end: float, limit: float, waiting_for: str, key: str) -> None:
        """Raise HangError if the answer is late or a rank has been silent for too long."""
        silent = {
            n: seconds
            for (kind, n), seconds in self.silences().items()
            if kind == "rank" and seconds > SILENT
        }
        is_late = time.monotonic() > end
        if not is_late and max(silent.values(), default=0.0) <= LONGEST_SILENCE:
            return
        problems = [f"no answer within {limit:.0f} s"] if is_late else []
        problems += [
            f"rank {rank} has been silent for {seconds:.0f} s" for rank, seconds in silent.items()
        ]
        hint = "logs/rank<n>.log in the run directory says where each rank is"
        raise HangError(
            f"{', '.join(problems)}: waiting for {waiting_for}",
            where=", ".join(map(self._name, silent)) or None,
            hint=f"{hint}; {key} is the limit" if is_late else hint,
        )

    def _await_death(self) -> None:
        """When a rank dies, the others fail at their next collective;
        the user must be shown the death."""
        end = time.monotonic() + FIND_CULPRIT_WITHIN
        while time.monotonic() < end:
            self._is_alive(LOST_AFTER)
            time.sleep(0.05)
        self._is_alive(MISSED)

    def close(self) -> None:
        self.pulses.close()
        self._listening.close()
        self._context.term()
        self._control.unlink(missing_ok=True)
