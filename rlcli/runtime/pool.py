"""A rank's end of a pool: a process on its node that runs the calls of one role while the rank runs others."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from rlcli.api.data import SequenceSample
from rlcli.errors import HangError, WorkerError
from rlcli.processes import ended_how
from rlcli.recipe.schema import Recipe
from rlcli.runtime.messages import Reply, Report, Request
from rlcli.runtime.rank_warnings import WARNED, log_again
from rlcli.runtime.transport import HELLO, ZmqMaster
from rlcli.topology import Topology
from rlcli.topology.groups import GIVEN_UP, pool_folders

HERE = "127.0.0.1"
"""Where a rank listens for its pools: they are on its node."""
LARGEST_BATCH = 1 << 32
"""Bytes of a message that holds the tensors of a whole batch."""
NO_LIMIT = 1e9
"""Seconds; the master's deadline for the call ends the run first."""
TRIES = 2
"""Number of processes that a call may cost."""
RUN = "run"
LOOK_SECONDS = 2.0
"""Seconds between two checks, on the file system of the run's folder, of whether a process is still replaced."""


def connect_pools(recipe: Recipe, topology: Topology, rank: int, run_dir: Path | None) -> dict[str, PoolProcess]:
    """Role → its process for this rank, once it is up. Raises the error that keeps one from starting."""
    if run_dir is None:
        return {}
    pools = {role: PoolProcess(folder) for role, folder in pool_folders(recipe, topology, rank, run_dir).items()}
    for pool in pools.values():
        pool.wait(recipe.launch.startup_deadline)
    return pools


class PoolProcess:
    """For one thread at a time. The launcher replaces a process that dies; its request is sent to the next one."""

    def __init__(self, folder: Path):
        self.name = folder.name
        self._log = folder.parent.parent / "logs" / f"{folder.name}.log"
        self._given_up = folder / GIVEN_UP
        self._link = ZmqMaster(folder, 1, self._check, HERE, LARGEST_BATCH)
        self._link.on_report = self._note
        self._looked = -LOOK_SECONDS
        self._number = 0
        self._has_died = ""
        """How the process that was last asked ended, once its replacement reports it."""

    def wait(self, deadline: float) -> None:
        """Wait until it is up. Raises HangError after `deadline` seconds, or the error of one that cannot start."""
        try:
            self._link.wait_for_workers(deadline)
        except HangError as error:
            raise self._hang(f"has not started within {deadline:.0f} s") from error

    def run(self, call: str, step: int, data: SequenceSample) -> SequenceSample:
        """A call's output for a batch. Raises the call's error, and WorkerError if it kills its process twice."""
        args = {"call": call, "step": step, **packed(data)}
        for _ in range(TRIES):
            self._number += 1
            self._has_died = ""
            answer = self._ask(Request(self._number, RUN, args))
            if answer is not None:
                return unpacked(answer)
        message = f"{self.name} {self._has_died} while it worked on call {call}, {TRIES} times"
        raise WorkerError(message, where=self.name, hint=f"see {self._log}", code="F01")

    def close(self) -> None:
        self._link.close()

    def _ask(self, request: Request) -> dict[str, Any] | None:
        """The answer; None if the process died first."""
        try:
            self._link.send(0, request)
        except WorkerError:  # it died since its last answer: ask the next one
            while not self._has_died:
                self._hear(self.name)
            self._has_died = ""
            self._link.send(0, request)
        while not self._has_died:
            reply = self._hear(request.args["call"])
            if reply is not None and reply.number == request.number:
                if reply.failure is not None:
                    raise reply.failure.as_error()
                return reply.value
        return None

    def _hear(self, waiting_for: str) -> Reply | None:
        try:
            return self._link.receive(NO_LIMIT, waiting_for)
        except HangError as error:
            raise self._hang("does not run any more") from error

    def _note(self, report: Report) -> None:
        if report.name == WARNED:
            log_again(report)
        if report.name == HELLO and report.failure is not None:
            raise report.failure.as_error()
        if report.name == HELLO and (code := report.value.get("last_exit")) is not None:
            why = f", as it used more than {report.value['cpu_s']:g} s of processor time for a call"
            self._has_died = ended_how(code) + (why if code == -signal.SIGPROF else "")

    def _check(self, patience: float) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if self._given_up.exists():
            message = f"{self.name} {self._given_up.read_text()}"
            raise WorkerError(message, where=self.name, hint=f"see {self._log}", code="F01")

    def _hang(self, what: str) -> HangError:
        return HangError(f"{self.name} {what}", where=self.name, hint=f"see {self._log}")


def packed(batch: SequenceSample) -> dict[str, Any]:
    """A batch as fields of a message."""
    tensors = {key: tensor for key, tensor in (batch.data or {}).items() if tensor is not None}
    return {
        "batch": batch.meta().as_json(),
        "tensors": save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}),
    }


def unpacked(fields: dict[str, Any]) -> SequenceSample:
    """The batch that `packed` wrote, in host memory."""
    batch = SequenceSample.from_json(fields["batch"])
    tensors: dict[str, torch.Tensor | None] = {**load(fields["tensors"])}
    return SequenceSample(
        ids=batch.ids, seqlens=batch.seqlens, data={key: tensors.get(key) for key in batch.keys},
        metadata=batch.metadata,
    )  # fmt: skip
