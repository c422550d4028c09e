"""What the master answers immediately, from a thread, even when it is busy: heartbeats, who may
connect, and the store.

Each process of a run sends a heartbeat every second from a thread of its own, with facts about
itself, so that work on neither side delays them. They show the master who is alive, and on several
nodes show each process that the master is. Between nodes, a process without an answer for
LOST_AFTER seconds ends itself. On one node silence is not judged: there a process dies with its
parent, and a master that was stopped by Ctrl-Z for an hour may continue.

Through the store the run's ranks, and their agents, find each other: names and bytes. torch's own
stores would listen on every interface and accept anything that anyone sends, or lock a file, which
not every shared file system can do. Every question is answered at once; whoever waits for a name
asks again (see `store`).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import zmq

from rlcli.messaging.control import Control, Listening, answer_doorkeeper
from rlcli.messaging.messages import (
    Fields,
    ProtocolError,
    Reply,
    Report,
    Request,
    pack,
    split,
    unpack,
)
from rlcli.processes import OwnPauses

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
HEARTBEAT = 5.0
"""Seconds without a sign of life that count as one missed heartbeat."""
LOST_AFTER = 3 * HEARTBEAT
"""Seconds after which a process on another node and the master count as lost to each other."""
TICK = 0.2

Kind = Literal["rank", "node"]
Peer = tuple[Kind, int]

ANSWER, END = "all is well", "the run has ended"
"""The master's answers."""


class Store:
    """What the run's store holds. Its semantics are those of torch's TCPStore."""

    OPERATIONS = ("set", "get", "add", "compare_set", "check", "delete", "count")
    """What a process may ask."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = b"%d" % total
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a value if the present one is the expected one, or missing and expected to be empty.
        Returns the value that it has then, or the expected one if it has none."""
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def count(self) -> int:
        return len(self._values)


class Pulses:
    """The master's end of heartbeats and store."""

    def __init__(self, listening: Listening):
        self._listening = listening
        self._token = listening.control.token
        self._store = Store()
        self.heard: dict[Peer, float] = {}
        """When each process was last heard."""
        self.facts: dict[Peer, Fields] = {}
        """What each process reports about itself."""
        self.is_over = False
        """Whether all processes are asked to end."""
        self.dismissed: set[Peer] = set()
        """Processes that were asked to end."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="pulses", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _serve(self) -> None:
        listening, poller = self._listening, zmq.Poller()
        for socket in (listening.doorkeeper, listening.pulses):
            poller.register(socket, zmq.POLLIN)
        while not self._ended.is_set():
            for socket, _ in poller.poll(int(TICK * 1000)):
                if socket is listening.doorkeeper:
                    answer_doorkeeper(listening)
                else:
                    self._take_in(*socket.recv_multipart())

    def _take_in(self, identity: bytes, *frames: bytes) -> None:
        """Answer a heartbeat, or a question to the store."""
        try:
            message = unpack(frames, self._token, Report, Request)
            if isinstance(message, Report):
                self._hear(identity, message)
            else:
                self._look_up(identity, message)
        except (ProtocolError, LookupError, TypeError, ValueError) as error:
            log.warning("a heartbeat or a request to the store was discarded: %s", error)

    def _hear(self, identity: bytes, beat: Report) -> None:
        peer: Any = (beat.name, beat.rank)
        self.facts[peer] = beat.value
        self.heard[peer] = time.monotonic()
        answer = END if self.is_over else ANSWER
        if self._send(identity, Request(0, answer)) and answer == END:
            self.dismissed.add(peer)

    def _look_up(self, identity: bytes, question: Request) -> None:
        if question.op not in Store.OPERATIONS:
            raise ProtocolError(f"the store has no operation {question.op}")
        value = getattr(self._store, question.op)(**question.args)
        self._send(identity, Reply(question.number, 0, {"value": value}))

    def _send(self, identity: bytes, answer: Request | Reply) -> bool:
        """False if the process has left, or reads nothing: its silence will be noticed."""
        try:
            self._listening.pulses.send_multipart(
                [identity, *split(pack(answer, self._token))], zmq.NOBLOCK
            )
        except zmq.ZMQError:
            return False
        return True


def is_answered(context: Any, control: Control, seconds: float) -> bool:
    """Whether a master answers there within some seconds."""
    socket = control.connect(context, control.pulses)
    try:
        socket.send_multipart(split(pack(Request(0, "count"), control.token)))
        # without the master's key nothing could arrive
        return bool(socket.poll(int(seconds * 1000)))
    finally:
        socket.close(linger=0)


class Pulse:
    """A process's end of heartbeats. `lost` is called, in a thread, once the master is lost or says
    that the run is over. `facts`: what it reports about itself from its first beat on."""

    def __init__(
        self, context: Any, control: Control, peer: Peer, lost: Callable[[str], None], **facts: Any
    ):
        self._context, self._control, self._peer, self._lost = context, control, peer, lost
        self._facts: Fields = {"pid": os.getpid(), **facts}
        self._to_watch: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_due = threading.Event()
        self._ended = threading.Event()
        self._answered = 0
        """Beats that the master has answered."""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def tell(self, **facts: Any) -> None:
        """Report a fact about this process with every beat from now on;
        the first beat is sent at once."""
        self._facts = self._facts | facts
        self._is_due.set()

    def tell_last(self, deadline: float, **facts: Any) -> None:
        """Report a fact and wait, up to `deadline` seconds, until the master has received it."""
        before = self._answered
        self.tell(**facts)
        end = time.monotonic() + deadline
        # one answer may already have been in flight
        while self._answered < before + 2 and time.monotonic() < end:
            self._is_due.set()
            time.sleep(TICK / 2)

    def watch(self, socket: Any) -> None:
        """Report to the master if this connection to it is lost:
        messages in flight are lost too."""
        if self._control.is_remote:
            self._to_watch.put(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        socket = self._control.connect(self._context, self._control.pulses)
        poller, watched = zmq.Poller(), list[Any]()
        poller.register(socket, zmq.POLLIN)
        pauses, heard, due = OwnPauses(), time.monotonic(), 0.0
        while not self._ended.is_set():
            for monitor in self._new_monitors():
                watched.append(monitor)
                poller.register(monitor, zmq.POLLIN)
            heard += pauses.since_last_look()
            due = self._send_if_due(socket, due)
            if self._hears_master(socket, poller):
                heard = time.monotonic()
                self._answered += 1
            if self._control.is_remote and time.monotonic() - heard > LOST_AFTER:
                self._lost(f"the master has not been heard from for {LOST_AFTER:.0f} s")
        for connection in (socket, *watched, *self._new_monitors()):
            connection.close(linger=0)

    def _send_if_due(self, socket: Any, due: float) -> float:
        """Send a beat that is due; returns when the next one is."""
        now = time.monotonic()
        if now < due and not self._is_due.is_set():
            return due
        self._is_due.clear()
        self._send(socket)
        return now + BEAT_SECONDS

    def _hears_master(self, socket: Any, poller: Any) -> bool:
        """Wait a moment for what arrives: whether there is an answer of the master. Notes the
        connections that are lost."""
        ready = dict(poller.poll(int(TICK * 1000)))
        is_ready = ready.pop(socket, None) is not None
        for monitor in ready:
            poller.unregister(monitor)
            self.tell(has_lost_connection=True)
        return is_ready and self._is_answer(socket.recv_multipart())

    def _new_monitors(self) -> Iterator[Any]:
        """The connections to watch that were added since the last call of this."""
        while not self._to_watch.empty():
            yield self._to_watch.get()

    def _send(self, socket: Any) -> None:
        kind, number = self._peer
        try:
            socket.send(pack(Report(number, kind, self._facts), self._control.token), zmq.NOBLOCK)
        except zmq.Again:  # the master has not read for long; the beats in flight will do
            return

    def _is_answer(self, frames: list[bytes]) -> bool:
        try:
            answer = unpack(frames, self._control.token, Request)
        except ProtocolError as error:
            log.warning("an answer to a heartbeat was discarded: %s", error)
            return False
        if answer.op == END:
            self._lost(END)
        return True
