"""One inference server: our own, which is started and restarted, or an existing one."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcli.api.network import LOOPBACK, address_of, free_port
from rlcli.errors import RlcliError, WorkerError
from rlcli.files import replace_file
from rlcli.processes import ended_how
from rlcli.server_slot import PORT, ServerSlot

from ._server_dialect import Dialect, WeightUpdate
from ._server_http import NOT_DONE, Endpoint

PROBE_S = 120.0
"""Seconds for a request that takes a server no time, on a busy machine;
also for an existing server to be ready."""
LOOK_EVERY_S = 0.25
LIVES = 4
"""How many times a server is started by a run: once, and again each time it has failed."""
PATH = "PYTHONPATH"
TRIES = 4
"""When this many connections have broken during one request, its server is restarted, even if it is
alive; after twice as many, the run ends."""


@dataclass(frozen=True)
class Launch:
    """How a server is started."""

    dialect: Dialect
    python: str
    model: Path
    """A folder with its configuration; weights are loaded later."""
    options: Mapping[str, Any]
    environment: Mapping[str, str]
    tp: int
    slots: tuple[ServerSlot, ...]
    """The folder that its agent reads; of a server over several nodes, that of each node's agent.
    The first node is ours, and has the endpoint."""
    seconds: float
    """Time until it must be ready."""

    def start(self) -> str:
        """Request a new server. Returns its key."""
        key = secrets.token_hex(32)  # a server would parse one that starts with "-" as an option
        settings = {
            **self.dialect.settings(self.model, self.tp, key),
            **{name.replace("_", "-"): value for name, value in self.options.items()},
        }
        variables = self._variables()
        if not self.spans_nodes:
            variables = {"GLOO_SOCKET_IFNAME": LOOPBACK, **variables}
            self._start_process(self.slots[0], settings, variables)
            return key
        meeting = f"{self.address}:{free_port(self.address)}"
        for node, slot in enumerate(self.slots):
            over_nodes = self.dialect.settings_over_nodes(len(self.slots), node, meeting)
            self._start_process(slot, {**settings, **over_nodes}, variables)
        return key

    def _variables(self) -> dict[str, str]:
        """The dialect's variables and the user's; if both set PYTHONPATH, it has the folders of
        both."""
        of_dialect = self.dialect.variables()
        variables = {**of_dialect, **self.environment}
        paths = [of_dialect.get(PATH), self.environment.get(PATH)]
        if any(paths):
            variables[PATH] = os.pathsep.join(filter(None, paths))
        return variables

    def _start_process(
        self, slot: ServerSlot, settings: Mapping[str, Any], environment: Mapping[str, str]
    ) -> None:
        # JSON is YAML; a file, because everybody on the machine can see arguments
        lines = (f"{name}: {json.dumps(value)}\n" for name, value in settings.items())
        replace_file(_settings_of(slot), "".join(lines).encode())
        command = [
            self.python,
            "-m",
            self.dialect.MODULE,
            "--config",
            str(_settings_of(slot)),
            "--port",
            PORT,
        ]
        slot.start(command, environment, [peer.folder for peer in self.slots if peer is not slot])

    def stop(self) -> None:
        for slot in self.slots:
            slot.stop()

    def forget_settings(self) -> None:
        """Remove the files with the key: a server reads them once."""
        for slot in self.slots:
            _settings_of(slot).unlink(missing_ok=True)

    @property
    def spans_nodes(self) -> bool:
        return len(self.slots) > 1

    @property
    def address(self) -> str:
        """The address of this machine at which the server's other nodes reach it."""
        return address_of(os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK))

    @property
    def ended(self) -> ServerSlot | None:
        """The process that ended first, if one has: then all of them have ended,
        or are about to."""
        with_exit = [slot for slot in self.slots if slot.exit_code is not None]
        return min(with_exit, key=lambda slot: not slot.ended_first, default=None)

    @property
    def given_up(self) -> str | None:
        """Why the server cannot be started any more; None if it can."""
        return next((why for slot in self.slots if (why := slot.given_up) is not None), None)


@dataclass
class Server:
    """A server, and what the client knows about it. Hold the lock to change it."""

    number: int
    dialect: Dialect
    endpoint: Endpoint
    launch: Launch | None = None
    """None: it belongs to the user, who starts and ends it."""
    ranks: int = 1
    patience: float = PROBE_S
    """Seconds for a request that takes a server no time."""
    is_ready: bool = False
    """Whether it has the current weights and takes requests."""
    has_released: bool = False
    """Whether it has given back the memory of its devices."""
    lives: int = 0
    """How many times it was made ready: failures in an earlier life say nothing about this one."""
    weights: WeightUpdate | None = None
    """Those that it has been given: again, when it is started again."""
    digest: Any = None
    """Digest of the weights that it holds, if it reports one."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def name(self) -> str:
        return f"the server at {self.endpoint.url}"

    @property
    def has_died(self) -> bool:
        """Whether it is ours and is known to have ended."""
        return self.launch is not None and self.launch.ended is not None

    def start(self) -> None:
        """Start it, without weights, and wait until it is ready. Raises WorkerError."""
        self.is_ready = False
        if self.launch is None:
            self._await(self.patience)
            return
        if self.lives >= LIVES:
            raise self.failure(f"has failed after each of {LIVES} starts")
        try:
            self._start(self.launch)
        finally:
            self.launch.forget_settings()

    def _start(self, launch: Launch) -> None:
        key, end = launch.start(), time.monotonic() + launch.seconds
        while (port := launch.slots[0].port) is None:
            self._check_agent(launch)
            if time.monotonic() >= end:
                raise self.failure("was not started: its agent did not answer")
            time.sleep(LOOK_EVERY_S)
        self.endpoint = Endpoint(f"http://127.0.0.1:{port}", key, self.endpoint.hint)
        self._await(end - time.monotonic())

    def _await(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.is_up:
            if self.launch is not None and (ended := self.launch.ended) is not None:
                self._check_agent(self.launch)
                raise self.failure(f"ended before it was ready ({ended_how(ended.exit_code or 0)})")
            if time.monotonic() >= end:
                raise self.failure(f"was not ready within {seconds:.0f} s")
            time.sleep(LOOK_EVERY_S)

    def _check_agent(self, launch: Launch) -> None:
        if (why := launch.given_up) is not None:
            raise self.failure(f"cannot be started any more: {why}")

    @property
    def is_up(self) -> bool:
        """Whether it takes requests."""
        return self._answers(self.dialect.READY)

    @property
    def is_alive(self) -> bool:
        """Whether it can still write a token."""
        return self._answers(self.dialect.ALIVE)

    @property
    def has_weights(self) -> bool:
        """Whether it reports the weights that it has been given."""
        try:
            return self.weights is not None and self.label() == self.weights.label
        except NOT_DONE:
            return False

    def _answers(self, path: str) -> bool:
        try:
            self.endpoint.get(path, self.patience)
        except NOT_DONE:
            return False
        return True

    def failure(self, message: str) -> RlcliError:
        """An error about the server; for our own, with the end of its log."""
        if self.launch is None:
            hint = "is it running, and at that address?"
            return WorkerError(f"{self.name} {message}", hint=hint, code="F91")
        slot = self.launch.ended or self.launch.slots[0]
        return WorkerError(
            f"{self.name} {message}; the end of {slot.log}:\n{slot.last_words()}", code="F91"
        )

    # -- weights -----------------------------------------------------------------------------------

    def take(self, update: WeightUpdate, way: str, seconds: float) -> None:
        """Load new weights into it, and check that it has them.

        Raises ServerGone, ServerLate, ServerRefused,
        or WorkerError if it has other weights afterwards.
        """
        self.is_ready = False
        if way == "disk":
            self.dialect.load(self.endpoint, update, seconds)
        else:
            self.dialect.send(self.endpoint, update, self.ranks, self._our_address(), seconds)
        reported = self.label()
        if reported != update.label:
            message = f"reports the weights {reported!r} after loading {update.label!r}"
            raise self.endpoint.hostile(message)
        self.weights = update
        self.digest = self.dialect.digest(self.endpoint, seconds)

    def _our_address(self) -> str:
        """The address of this machine at which all of the server's processes reach it."""
        if self.launch is not None and self.launch.spans_nodes:
            return self.launch.address
        return _address_towards(self.endpoint.host)

    def label(self) -> str | None:
        """The version of its weights, as it reports it."""
        reported = self.dialect.label(self.endpoint, self.patience)
        return reported if isinstance(reported, str) else None

    def stop(self) -> None:
        if self.launch is not None:
            self.launch.stop()


def _settings_of(slot: ServerSlot) -> Path:
    return slot.folder / "settings.yaml"


def attached(
    dialect: Dialect, urls: Sequence[str], key: str | None, ranks: int, patience: float
) -> list[Server]:
    """Existing servers; `patience`: seconds for a request that takes no time, up to `PROBE_S`."""
    patience = min(PROBE_S, patience)
    endpoints = [Endpoint(url.rstrip("/"), key, dialect.hint) for url in urls]
    return [
        Server(number, dialect, endpoint, ranks=ranks, patience=patience)
        for number, endpoint in enumerate(endpoints)
    ]


def started_servers(launches: Sequence[Launch]) -> list[Server]:
    nowhere = "http://127.0.0.1:1"
    return [
        Server(
            number,
            launch.dialect,
            Endpoint(nowhere, hint=launch.dialect.hint),
            launch,
            ranks=launch.tp,
        )
        for number, launch in enumerate(launches)
    ]


def _address_towards(host: str) -> str:
    """The address of this machine from which a host is reached; of IPv6 only if it has no other."""
    addresses = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, _, _, _, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
