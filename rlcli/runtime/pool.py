"""A pool: processes on a rank's node that run the calls of one role while the rank runs others.

A rank has a `PoolProcess` for each role that runs in one. The process is `python -P -m
rlcli.runtime.pool ROLE RUN_DIR INDEX`; it computes on the CPU,
within limits on processor time and memory.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load, save

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import DROPPED, REASONS
from rlcli.api.model import call_interface
from rlcli.api.timing import TimeSpan, Timing, add_span
from rlcli.errors import HangError, ResourceError, WorkerError, log_printably
from rlcli.garbage import collect_as_usual, collect_rarely, leave_garbage
from rlcli.messaging.control import Control
from rlcli.messaging.messages import (
    HELLO,
    WARNED,
    Fields,
    Reply,
    Report,
    Request,
    log_again,
    logged_failure,
    report_warnings,
)
from rlcli.messaging.zmq_master import ZmqMaster
from rlcli.messaging.zmq_worker import ZmqWorker
from rlcli.processes import ended_how, keep_private
from rlcli.recipe.graph import eval_graph, train_graph
from rlcli.recipe.schema import Recipe
from rlcli.registry.faults import attribute_user_errors, origin_of_call
from rlcli.runtime.call_outputs import read_output
from rlcli.runtime.data_order import location_of_sample
from rlcli.runtime.roles import Interfaces, describe_role, seed_global_streams
from rlcli.runtime.worker_main import read_recipe
from rlcli.topology import Topology, plan_topology
from rlcli.topology.groups import GIVEN_UP, LAST_EXIT, pool_folders, pool_name, process_folder

HERE = "127.0.0.1"
"""Where a rank listens for its pools: they are on its node."""
LARGEST_BATCH = 1 << 32
"""Bytes of a message that holds the tensors of a whole batch."""
NO_LIMIT = 1e9
"""Seconds; the master's deadline for the call ends the run first."""
TRIES = 2
"""Number of processes that a call may cost."""
RUN = "run"
TASK = "task"
"""Kind of a span: a call in the process of a pool."""
LOOK_SECONDS = 2.0
"""Seconds between two checks, on the file system of the run's folder,
of whether a process is still replaced."""

GIB = 2**30
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")
"""What torch's error says where Python would raise MemoryError."""


def connect_pools(
    recipe: Recipe, topology: Topology, rank: int, run_dir: Path | None
) -> dict[str, PoolProcess]:
    """Role → its process for this rank, once it is up.
    Raises the error that keeps one from starting."""
    if run_dir is None:
        return {}
    pools = {
        role: PoolProcess(folder)
        for role, folder in pool_folders(recipe, topology, rank, run_dir).items()
    }
    for pool in pools.values():
        pool.wait(recipe.launch.startup_deadline)
    return pools


class PoolProcess:
    """For one thread at a time. The launcher replaces a process that dies;
    its request is sent to the next one."""

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
        """Wait until it is up. Raises HangError after `deadline` seconds,
        or the error of one that cannot start."""
        try:
            self._link.wait_for_workers(deadline)
        except HangError as error:
            raise self._hang(f"has not started within {deadline:.0f} s") from error

    def run(self, call: str, step: int, data: SequenceSample) -> SequenceSample:
        """A call's output for a batch. Raises the call's error,
        and WorkerError if it kills its process twice."""
        args = {"call": call, "step": step, **packed(data)}
        for _ in range(TRIES):
            self._number += 1
            self._has_died = ""
            answer = self._ask(Request(self._number, RUN, args))
            if answer is not None:
                return unpacked(answer)
        message = f"{self.name} {self._has_died} while it worked on call {call}, {TRIES} times"
        raise self._death(message)

    def close(self) -> None:
        self._link.close()

    def _ask(self, request: Request) -> Fields | None:
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
                self._record(request, Timing.from_json(reply.timing))
                return reply.value
        return None

    def _record(self, request: Request, timing: Timing) -> None:
        """Add the time of a task in its process to that of the call."""
        add_span(TimeSpan(request.args["call"], TASK, timing.began, timing.ended, self.name))

    def _hear(self, waiting_for: str) -> Reply | None:
        try:
            return self._link.receive(NO_LIMIT, waiting_for)
        except HangError as error:
            raise self._hang("is no longer running") from error

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
            raise self._death(message)

    def _death(self, message: str) -> WorkerError:
        return WorkerError(message, where=self.name, hint=f"see {self._log}", code="F01")

    def _hang(self, problem: str) -> HangError:
        return HangError(f"{self.name} {problem}", where=self.name, hint=f"see {self._log}")


def packed(batch: SequenceSample) -> Fields:
    """A batch as fields of a message."""
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in batch.data.items()}
    return {"batch": batch.meta().as_json(), "tensors": save(tensors)}


def unpacked(fields: Fields) -> SequenceSample:
    """The batch that `packed` wrote, in host memory."""
    batch = SequenceSample.from_json(fields["batch"])
    tensors = load(fields["tensors"])
    return SequenceSample(
        ids=batch.ids,
        seqlens=batch.seqlens,
        data={key: tensors[key] for key in batch.keys},
        metadata=batch.metadata,
    )


def main(role: str, run_dir: Path, index: int) -> None:
    collect_rarely()
    keep_private()
    log_printably()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    failure = logged_failure(f"{pool_name(role)}{index}")
    recipe = read_recipe(run_dir)
    folder = process_folder(run_dir, "pool", pool_name(role), index)
    started: PoolWorker | BaseException
    try:
        started = PoolWorker(recipe, role, index)
    except Exception as error:
        started = error
    collect_as_usual()
    Control.wait_for(folder, recipe.launch.startup_deadline)
    link = ZmqWorker(folder, 0, most=LARGEST_BATCH)
    report_warnings(link.report)
    if isinstance(started, BaseException):
        link.fail(failure(started))
        link.close()
        sys.exit(1)
    last_exit = os.environ.get(LAST_EXIT)
    link.serve(
        started.handle,
        failure,
        last_exit=int(last_exit) if last_exit is not None else None,
        cpu_s=started.cpu_s,
    )


class PoolWorker:
    """Runs the calls of one role."""

    def __init__(self, recipe: Recipe, role: str, index: int):
        self._recipe = recipe
        self._rank = plan_topology(recipe).placement(role).ranks[index]
        graphs = train_graph(recipe), eval_graph(recipe)
        self._calls = {mfc.name: mfc for graph in graphs for mfc in graph if mfc.model_name == role}
        self._interfaces = Interfaces(*graphs)
        model, backend = describe_role(recipe, role, torch.device("cpu"))
        self._model = backend.initialize(model, None)
        self.cpu_s: float = backend.cpu_s  # type: ignore[attr-defined]
        self._memory_gib: float = backend.memory_gib  # type: ignore[attr-defined]
        self._limit_memory()

    def _limit_memory(self) -> None:
        """Limit this process's memory. Raises ResourceError if even an idle process takes more."""
        limit, taken = int(self._memory_gib * GIB), psutil.Process().memory_info().vms
        if limit < taken:
            message = (
                f"a process of a pool takes {taken / GIB:.3g} GiB of address space "
                "before it has done anything"
            )
            raise ResourceError(
                message, hint=f"{self._memory_key} is {self._memory_gib:g}", code="F51"
            )
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))

    @property
    def _memory_key(self) -> str:
        return f"models.{self._model.name}.backend.args.memory_gib"

    def handle(self, request: Request) -> Fields:
        """A call that uses more CPU time than allowed is ended by the kernel,
        together with this process."""
        signal.setitimer(signal.ITIMER_PROF, self.cpu_s)
        try:
            with attribute_user_errors():
                return self._within_memory(**request.args)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _within_memory(self, call: str, **args: Any) -> Fields:
        try:
            return self._run(call, **args)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not any(
                words in str(error) for words in OUT_OF_MEMORY
            ):
                raise
            message = f"call {call} needs more than {self._memory_gib:g} GiB of memory"
            raise ResourceError(
                message, hint=f"{self._memory_key} is the limit", code="F51"
            ) from error

    def _run(self, call: str, step: int, batch: Fields, tensors: bytes) -> Fields:
        def describe(id_: Hashable) -> str:
            return location_of_sample(self._recipe, str(id_))

        mfc, data = self._calls[call], unpacked({"batch": batch, "tensors": tensors})
        interface = self._interfaces.of(mfc)
        seed_global_streams(self._recipe.seed, call, step, self._rank)
        returned = call_interface(
            interface, mfc.interface_type.value, self._model, data, mfc.mb_spec
        )
        section = self._recipe.models[mfc.model_name].backend
        backend = section.type if section is not None else None
        origin = origin_of_call(mfc, backend, interface, False, describe)
        output, counts, _ = read_output(mfc, data, returned, origin, self._model.device)
        sent = (*counts, DROPPED, REASONS)
        output.metadata = {name: values for name, values in output.metadata.items() if name in sent}
        return packed(output)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    leave_garbage()
