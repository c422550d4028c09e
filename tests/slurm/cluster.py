"""A real Slurm cluster of four emulated nodes on loopback: munged,
slurmctld and a slurmd for each node.

All of it is started in the foreground as children of this process, with a folder, keys and ports of
its own, so an installation of Slurm on this machine is neither used nor disturbed. Nodes share this
machine's files but for one folder (`unshared`), of which `CUT_OFF` sees its own, empty version.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

from rlcli.processes import die_with_parent

NODES = ("node1", "node2", "node3", "node4")
CUT_OFF = "node4"
READY_WITHIN = 60.0
KILL_WAIT = 5
"""Seconds between SIGTERM and SIGKILL for a job that is ended."""
GRACE = 120
"""Seconds that a preempted job of the partition `debug` gets."""

CONFIGURATION = """\
ClusterName=emulated
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
SlurmctldPort={controller}
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.%n.log
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageHost=localhost
AccountingStoragePass={home}/munge.socket
AccountingStoragePort={accounting}
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=5,batch_sched_delay=0,bf_interval=3,bf_window=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
MailProg=/bin/true
KillWait={kill_wait}
NodeName=DEFAULT CPUs=8 RealMemory=4000 State=UNKNOWN
NodeName=node[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}]
PartitionName=debug Nodes=node[1-4] Default=YES MaxTime=60 PriorityTier=1 GraceTime={grace} State=UP
PartitionName=urgent Nodes=node[1-4] MaxTime=60 PriorityTier=10 PreemptMode=OFF State=UP
{settings}
"""
SETTINGS = {
    "AccountingStorageType": "accounting_storage/none",
    "MinJobAge": 300,
}
"""Settings that a cluster may have otherwise. `MinJobAge`: seconds after which the controller
forgets an ended job."""


class Cluster:
    """The cluster, and what tests ask of it and do to it."""

    KIND = "cluster"

    def __init__(self, home: Path, settings: Mapping[str, object] = MappingProxyType({})):
        self._home = home
        self._settings = SETTINGS | settings
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.unshared = home / "unshared"
        """A folder that `CUT_OFF` does not share with the other nodes."""
        self.environment: Mapping[str, str] = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}
        for name in ("state", "spool", "unshared"):
            (home / name).mkdir()
        self._configure()

    def _configure(self) -> None:
        first, accounting, *others = _free_ports(6)
        self._accounting_port = accounting
        text = CONFIGURATION.format(
            home=self._home,
            host=socket.gethostname().split(".")[0],
            controller=first,
            accounting=accounting,
            ports=",".join(map(str, others)),
            kill_wait=KILL_WAIT,
            grace=GRACE,
            settings="\n".join(f"{name}={value}" for name, value in self._settings.items()),
        )
        (self._home / "slurm.conf").write_text(text)
        # nothing uses it, but it must be valid
        (self._home / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self._home / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def start(self) -> None:
        self._start_munge()
        self._start_accounting()
        self._start("slurmctld", ["slurmctld", "-D", "-c"])
        for node in NODES:
            self.start_node(node)
        wait_for(self._is_idle, READY_WITHIN)

    def _start_munge(self) -> None:
        files = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munged.pid",
            "log-file": "munged.log",
            "seed-file": "munged.seed",
        }
        self._home.chmod(0o755)  # munged wants a way to its socket for all
        munge = [
            "munged",
            "--foreground",
            "--force",
            *(f"--{k}={self._home / v}" for k, v in files.items()),
        ]
        self._start("munged", munge)
        wait_for((self._home / "munge.socket").exists, READY_WITHIN)

    def _start_accounting(self) -> None:
        """Of a cluster that keeps accounts."""

    def start_node(self, node: str) -> None:
        (self._home / "spool" / node).mkdir(exist_ok=True)
        command = ["slurmd", "-D", "-c", "-N", node]
        if node == CUT_OFF:
            hide = 'mount -t tmpfs none "$0" && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", hide, str(self.unshared), *command]
        self._start(node, command)

    def _start(
        self, name: str, command: list[str], variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        with open(self._home / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                command,
                env={**self.environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self._home,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def stop(self) -> None:
        """End everything, jobs first."""
        self.cancel_all()
        for process in [*self.step_daemons(), *self._daemons.values()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in self._daemons.values():
            daemon.wait(READY_WITHIN)

    def cancel_all(self) -> None:
        """End all jobs and wait until they are gone."""
        if self._is_up():
            self.run("scancel", "--user=root")
            wait_for(lambda: not self.run("squeue", "--noheader"), KILL_WAIT + READY_WITHIN)

    def lose_node(self, node: str) -> None:
        """Make a node die with all of its processes."""
        self._daemons[node].kill()
        self._daemons[node].wait(READY_WITHIN)
        for process in self.step_daemons(node):
            _kill_family(process)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def bring_back(self, node: str) -> None:
        self.start_node(node)
        wait_for(self._is_idle, READY_WITHIN)  # ReturnToService=2

    def run(self, *command: str) -> str:
        """A Slurm command's output. Raises CalledProcessError."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True
        ).stdout

    def field(self, job: str, name: str) -> str:
        """One field of the output of `scontrol show job`."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    @property
    def log(self) -> str:
        """The last lines of the controller's log."""
        return "\n".join((self._home / "slurmctld.log").read_text().splitlines()[-40:])

    def step_daemons(self, node: str | None = None) -> list[psutil.Process]:
        """The daemons that run steps and batch scripts:
        each `slurmstepd` keeps the variables of its `slurmd`."""
        return [one for one in psutil.process_iter() if _is_step_daemon(one, self._home, node)]

    def _is_up(self) -> bool:
        return "slurmctld" in self._daemons and self._daemons["slurmctld"].poll() is None

    def _assert_alive(self) -> None:
        for name, daemon in self._daemons.items():
            assert daemon.poll() is None, f"{name}: {(self._home / f'{name}.out').read_text()}"

    def _is_idle(self) -> bool:
        self._assert_alive()
        with contextlib.suppress(subprocess.CalledProcessError):
            return (
                self.run(
                    "sinfo", "--noheader", "--Node", "--partition=debug", "--format=%T"
                ).split()
                == ["idle"] * 4
            )
        return False


def _is_step_daemon(process: psutil.Process, home: Path, node: str | None) -> bool:
    with contextlib.suppress(psutil.Error):
        if process.name() == "slurmstepd":
            variables = process.environ()
            is_ours = variables.get("SLURM_CONF") == str(home / "slurm.conf")
            return is_ours and node in (None, variables.get("SLURMD_NODENAME"))
    return False


def _kill_family(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("waited in vain")
        time.sleep(0.1)


def _free_ports(count: int) -> Iterator[int]:
    with contextlib.ExitStack() as probes:
        for _ in range(count):
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            yield int(probe.getsockname()[1])
