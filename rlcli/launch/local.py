"""One process per device on this machine, started by torchrun; the master stays in the process that was called."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import WorkerError
from rlcli.project import VARIABLE, current_project

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe
    from rlcli.runtime.transport import Transport
    from rlcli.topology import Topology

WORKER_FILE = "worker.json"
GRACE = 10.0
"""Seconds between asking processes to end and ending them."""
LAST_LINES = 12


def torchrun_command(run_dir: Path, ranks: int, max_restarts: int = 0) -> list[str]:
    """What starts the ranks."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        f"--max-restarts={max_restarts}", "-m", "rlcli.runtime.worker_main", str(run_dir),
    ]  # fmt: skip


def worker_environment(ranks: int) -> dict[str, str]:
    """Cores are shared out, not fought for; components are found as they are found here."""
    cores = max(1, len(os.sched_getaffinity(0)) // ranks)
    environment = {**os.environ, "OMP_NUM_THREADS": str(cores), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONSAFEPATH": "1"}
    project = current_project()
    if project is not None:
        environment[VARIABLE] = str(project)
    package_home = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_home, os.environ.get("PYTHONPATH")]))
    return environment


class LocalRanks:
    """The ranks of one run as a transport; leaving the context ends them all."""

    def __init__(self, recipe: Recipe, topology: Topology, run_dir: Path):
        from rlcli.runtime.transport import ZmqMaster

        self._logs = run_dir / "logs"
        self._logs.mkdir(mode=0o700, exist_ok=True)
        _write_private(run_dir / WORKER_FILE, json.dumps(recipe.model_dump(mode="json")))
        ranks = topology.world_size
        self._process = subprocess.Popen(
            torchrun_command(run_dir, ranks, recipe.launch.max_restarts),
            env=worker_environment(ranks),
            stdin=subprocess.DEVNULL,
            stdout=(self._logs / "torchrun.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            self.transport: Transport = master = ZmqMaster(run_dir, ranks, self._check_alive)
            master.wait_for_workers(recipe.launch.startup_deadline)
        except BaseException:
            self.close()
            raise

    def _check_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise WorkerError(
                f"{self._culprit()}\n{self._last_lines()}".rstrip(),
                where=f"torchrun pid {self._process.pid}",
                hint=f"the whole story is in {self._logs}",
                code="F01",
            )

    def _culprit(self) -> str:
        """Which rank ended first, in torchrun's words."""
        log = (self._logs / "torchrun.log").read_text(errors="replace")
        _, found, cause = log.rpartition("Root Cause")
        facts = {}
        for line in cause.splitlines() if found else []:
            key, colon, value = line.strip().partition(":")
            if colon:
                facts.setdefault(key.strip(), value.strip())
        if "rank" not in facts:
            return f"the workers ended with exit code {self._process.returncode}"
        rank, code = facts["rank"].split()[0], facts.get("exitcode", "?").split()[0]
        pid = facts.get("exitcode", "").partition("pid:")[2].strip(" )")
        if code.startswith("-"):
            name = signal.Signals(-int(code)).name
            return f"rank {rank} (pid {pid}) was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"rank {rank} (pid {pid}) ended with exit code {code}"

    def _last_lines(self) -> str:
        texts = []
        for log in sorted(self._logs.glob("rank*.log")):
            lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            if any(line.strip() for line in lines):
                texts.append("\n".join([f"last lines of {log.name}:", *(f"  {line}" for line in lines)]))
        return "\n".join(texts)

    def wait(self) -> None:
        """Until the ranks have ended by themselves, which they do after `shutdown`."""
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            return

    def close(self) -> None:
        """End every process of the run; nothing outlives it."""
        transport = getattr(self, "transport", None)
        if transport is not None:
            transport.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if _session_is_empty(self._process):
                break
            _signal_session(self._process.pid, number)
            end = time.monotonic() + GRACE
            while time.monotonic() < end and not _session_is_empty(self._process):
                time.sleep(0.05)

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def _signal_session(pid: int, number: int) -> None:
    """The children are in sessions of torchrun's; they die with it by their own parent-death signal."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def _session_is_empty(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


def _die_with_parent() -> None:
    """Runs in the child between fork and exec: SIGKILL for it when its parent is gone."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
