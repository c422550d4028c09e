"""One process per device on this machine, started by torchrun; the master stays in the process that was called."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rlcli.errors import HangError, ResourceError, WorkerError
from rlcli.files import open_private
from rlcli.launch.cores import available_cores
from rlcli.launch.meeting import MeetingFolder
from rlcli.processes import STOP_SIGNALS, die_with_parent
from rlcli.project import VARIABLE, current_project
from rlcli.runtime.worker_main import MASTER, MEETING

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe
    from rlcli.runtime.transport import ZmqMaster
    from rlcli.topology import Topology

WORKER_FILE = "worker.json"
PROCESSES_FILE = "procs.json"
GRACE = 10.0
"""Seconds that processes may take to be gone once they are ended."""
REPORT_WITHIN = 5.0
"""Seconds within which torchrun reports a rank that failed."""
LAST_LINES = 12


def torchrun_command(run_dir: Path, ranks: int, meeting: Path) -> list[str]:
    """What starts the ranks. They meet in files, so nothing listens but on loopback."""
    return [
        sys.executable, "-m", "rlcli.runtime.torchrun", "--nnodes=1", f"--nproc-per-node={ranks}", "--max-restarts=0",
        "--signals-to-handle=SIGQUIT",
        "--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={meeting / 'torchrun'}",
        f"--rdzv-id={uuid.uuid4().hex}", f"--log-dir={run_dir / 'logs' / 'torchrun'}",
        "-m", "rlcli.runtime.worker_main", str(run_dir),
    ]  # fmt: skip


def worker_environment(ranks: int, meeting: Path) -> dict[str, str]:
    """Cores are shared out, not fought for; components are found as they are found here."""
    environment = {
        "OMP_NUM_THREADS": str(max(1, available_cores() // ranks)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        MEETING: str(meeting),
        MASTER: str(os.getpid()),
    }
    project = current_project()
    if project is not None:
        environment[VARIABLE] = str(project)
    package_home = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_home, os.environ.get("PYTHONPATH")]))
    return environment


def start_torchrun(run_dir: Path, ranks: int, meeting: Path) -> subprocess.Popen[bytes]:
    """It leads a session of its own, and ends with this process."""
    with os.fdopen(_private_file(run_dir / "logs" / "torchrun.log"), "wb") as log:
        return subprocess.Popen(
            torchrun_command(run_dir, ranks, meeting),
            env=worker_environment(ranks, meeting),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(_become_child, os.getpid()),
        )


class LocalRanks:
    """The ranks of one run; leaving the context ends them all."""

    transport: ZmqMaster

    def __init__(self, recipe: Recipe, topology: Topology, run_dir: Path):
        from rlcli.runtime.transport import ZmqMaster

        self._run_dir = run_dir
        self._logs = run_dir / "logs"
        self._logs.mkdir(mode=0o700, exist_ok=True)
        _write_private(run_dir / WORKER_FILE, json.dumps(recipe.model_dump(mode="json")))
        ranks = topology.world_size
        with contextlib.ExitStack() as undo:
            self._meeting = MeetingFolder()
            undo.callback(self._meeting.close)
            self.transport = ZmqMaster(self._meeting.path, ranks, self._check_alive)
            undo.callback(self.transport.close)
            self._process = start_torchrun(run_dir, ranks, self._meeting.path)
            undo.pop_all()
        self._started: dict[int, float] = {}
        try:
            self.transport.wait_for_workers(recipe.launch.startup_deadline)
            self._note_processes()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def _note_processes(self) -> None:
        """procs.json: pid and start time of every process, enough to end it even if we cannot."""
        import psutil

        pids = {"torchrun": self._process.pid, **{f"rank{r}": pid for r, pid in sorted(self.transport.pids.items())}}
        self._started = {pid: psutil.Process(pid).create_time() for pid in pids.values() if psutil.pid_exists(pid)}
        entries = [{"name": name, "pid": pid, "started": self._started.get(pid)} for name, pid in pids.items()]
        _write_private(self._run_dir / PROCESSES_FILE, json.dumps(entries, indent=2) + "\n")

    def _check_alive(self) -> None:
        """Raises WorkerError once torchrun has ended, which it does when a rank has failed, or a rank has just left."""
        gone = self._first_that_left() if self._process.poll() is None else None
        if gone is not None:
            self._await_torchrun()
        if self._process.poll() is None:
            if gone is None:
                return
            what = f"rank {gone} ended with exit code 0 before the run was over: sys.exit or os._exit was called"
            place = f"rank {gone} pid {self.transport.pids[gone]}"
            raise WorkerError(what, where=place, hint=f"its log is {self._logs / f'rank{gone}.log'}", code="F01")
        rank, what = self._culprit()
        log = self._logs / ("torchrun.log" if rank is None else f"rank{rank}.log")
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
        if any(line.strip() for line in lines):
            what = "\n".join([f"{what}; last lines of {log.name}:", *(f"  {line}" for line in lines)])
        place = "torchrun" if rank is None else f"rank {rank} pid {self.transport.pids.get(rank, '?')}"
        raise WorkerError(what, where=place, hint=f"the whole story is in {self._logs}", code="F01")

    def _first_that_left(self) -> int | None:
        """A rank that has ended without being asked to; torchrun does not report one whose exit code is 0."""
        import psutil

        if self.transport.has_let_go:
            return None
        for rank, pid in self.transport.pids.items():
            try:
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    return rank
            except psutil.NoSuchProcess:
                return rank
        return None

    def _await_torchrun(self) -> None:
        """If the rank failed, torchrun notices, and reports its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REPORT_WITHIN)

    def _culprit(self) -> tuple[int | None, str]:
        """Which rank ended first, and how, from torchrun's own report."""
        report = (self._logs / "torchrun.log").read_text(errors="replace").rpartition("Root Cause")[2]
        rank = re.search(r"^\s*rank\s*:\s*(\d+)", report, re.MULTILINE)
        code = re.search(r"^\s*exitcode\s*:\s*(-?\d+)", report, re.MULTILINE)
        if rank is None or code is None:
            return None, f"the workers ended with exit code {self._process.returncode}"
        number = int(code[1])
        if number >= 0:
            return int(rank[1]), f"rank {rank[1]} ended with exit code {number}"
        name = signal.Signals(-number).name
        why = " (out of memory?)" if name == "SIGKILL" else ""
        return int(rank[1]), f"rank {rank[1]} was killed by {name}{why}"

    def wait(self) -> None:
        """Until the ranks have ended by themselves, which they do after `shutdown`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=60)

    def close(self) -> None:
        """End every process of the run that is left; nothing outlives it."""
        _kill_session(self._process.pid)
        end = time.monotonic() + GRACE
        while time.monotonic() < end and not _session_is_empty(self._process):
            time.sleep(0.05)
        self._end_stragglers()
        self.transport.close()
        self._meeting.close()

    def _end_stragglers(self) -> None:
        """The ranks die with torchrun by their parent-death signal; this is for one that somehow did not."""
        import psutil

        for pid, started in self._started.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == started:
                    process.kill()
                    process.wait(GRACE)

    def _ask_for_stacks(self) -> None:
        """Every rank writes to its log where it is."""
        for pid in self.transport.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, HangError):
            self._ask_for_stacks()
        self.close()


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(_private_file(path), "w") as file:
        file.write(text)


def _private_file(path: Path) -> int:
    """A new file for its owner alone. Raises ResourceError F75, also for a link, which would lead elsewhere."""
    try:
        return open_private(path, os.O_WRONLY | os.O_TRUNC)
    except OSError as error:
        what = f"not writable: {error.strerror or error}"
        raise ResourceError(what, where=str(path), hint="remove it, or choose another folder", code="F75") from None


def _kill_session(pid: int) -> None:
    """The ranks are in sessions of their own; they die with torchrun by their parent-death signal."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _session_is_empty(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


def _become_child(parent: int) -> None:
    """Runs in the child between fork and exec: SIGKILL for it when its parent is gone.

    Signals that ask for an orderly stop are the parent's affair, also where a scheduler sends them to every process.
    """
    die_with_parent()
    if os.getppid() != parent:  # it was gone before we asked
        os._exit(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
