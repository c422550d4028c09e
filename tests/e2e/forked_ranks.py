"""Ranks that are forks of the master, as the master may be a fork of a process that has everything
loaded.

A small process replaces the agent of the node: it ends all ranks once one has failed, and reports
which. The real agent is tested in `tests/launch`.
"""

import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import zmq

from rlcli.api.network import LOOPBACK
from rlcli.launch import local
from rlcli.messaging.control import Control
from rlcli.messaging.pulse import Pulse
from rlcli.processes import die_with_parent
from rlcli.runtime import worker_main
from rlcli.testing.ranks import leave_groups_of_parent

Prepare = Callable[[int], object]
"""Called by each rank with the number of ranks before its work;
its result is kept as long as the rank runs."""


@contextlib.contextmanager
def forked_ranks(prepare: Prepare = lambda ranks: None) -> Iterator[None]:
    """Runs with this process as the master have forked ranks."""
    with mock.patch.object(local, "start_agent", functools.partial(_Agent, prepare)):
        yield


class _Agent:
    """The part of `subprocess.Popen` that launchers use, for one node; it does the same as
    `rlcli.launch.node`."""

    def __init__(
        self,
        prepare: Prepare,
        run_dir: Path,
        node: int,
        environment: dict[str, str],
        folder: Path | None,
    ):
        self.returncode: int | None = None
        recipe = json.loads((run_dir / worker_main.WORKER_FILE).read_text())
        ranks = recipe["cluster"]["devices_per_node"]
        sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        lo = {"GLOO_SOCKET_IFNAME": LOOPBACK}

        def rank(number: int) -> None:
            os.environ.update(
                {"RANK": str(number), "LOCAL_RANK": str(number), worker_main.NODE: "0"}
            )
            torch.set_num_threads(1)
            prepared = prepare(ranks)
            worker_main.main(run_dir)
            del prepared

        def agent() -> None:
            os.setsid()
            die_with_parent()
            os.environ.update({**environment, **sizes, **lo, worker_main.AGENT: str(os.getpid())})
            for stream in (1, 2):
                redirect(stream, run_dir / "logs" / "node0.log")
            started = {fork(lambda number=number: rank(number)): number for number in range(ranks)}
            _watch(started, Path(environment[worker_main.MEETING]))

        self.pid = fork(agent)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("torchrun", timeout)
            time.sleep(0.005)


def _watch(ranks: dict[int, int], meeting: Path) -> None:
    """Wait until all ranks (pid → number) have ended, or until one has failed,
    which is reported to the master."""
    context = zmq.Context()
    pulse = Pulse(context, Control.read(meeting), ("node", 0), lambda why: os._exit(1))
    while ranks:
        pid, status = os.wait()
        number, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            for sibling in ranks:
                os.kill(sibling, signal.SIGKILL)
            pulse.tell_last(5, rank=number, exit=code)
            os._exit(1)
    pulse.tell_last(5, is_over=True)
    pulse.close()
    context.term()


def fork(work: Callable[[], object]) -> int:
    """The pid of a child that does the work and ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    gc.freeze()  # objects of the parent must not be finalised here
    try:
        leave_groups_of_parent()
        work()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def redirect(number: int, file: str | Path) -> None:
    """Append output to stdout (1) or stderr (2), by Python or by libraries, to a file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, number)
    os.close(descriptor)
    setattr(
        sys, {1: "stdout", 2: "stderr"}[number], os.fdopen(number, "w", buffering=1, closefd=False)
    )
