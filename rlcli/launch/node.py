"""The agent of one node: `python -P -m rlcli.launch.node RUN_DIR NODE`. It is torchrun,
with three differences.

Agents find each other through the run's store, where torchrun would open a port that accepts
anything. Once a rank has died, the others are ended by SIGKILL: ranks ignore SIGTERM (see
`worker_main`), and torchrun would wait half a minute for them. Finally, the agent sends the master
heartbeats that say which ranks have ended, and how; it exits when it has lost the master.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import zmq

from rlcli.errors import RlcliError
from rlcli.garbage import collect_rarely, leave_garbage
from rlcli.inspect.cores import available_cores
from rlcli.launch.children import REPLACEMENTS, Members
from rlcli.launch.interfaces import interface_of
from rlcli.launch.launcher import Restart
from rlcli.launch.memory_kills import MemoryKills, memory_in_use
from rlcli.messaging.control import CONTROL_FILE, Control
from rlcli.messaging.pulse import END, Pulse, is_answered
from rlcli.open_files import raise_limit
from rlcli.processes import STOP_SIGNALS, start_time
from rlcli.runtime.worker_main import AGENT, MEETING, read_recipe
from rlcli.topology import plan_topology
from rlcli.topology.groups import process_groups

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from rlcli.recipe.schema import Recipe

SHARED_MEETING = "meeting"
"""Folder in the run's folder where the processes of several nodes meet."""
BEGUN_WITHIN = 3600.0
"""Seconds that an agent started by hand waits for the first node;
the recipe may run others first."""
ANSWERED_WITHIN = 2.0
"""Seconds for the master to answer an agent started by hand,
before that looks for another master."""
HEARD_WITHIN = 5.0
"""Seconds for the master to receive an agent's last report."""
LOOK_SECONDS = 1.0
"""Seconds between two checks of which ranks are alive."""
FAILED, LOST = 7, 8
"""Exit codes: a process of the run has failed; the master is lost."""


def main(run_dir: Path, node: int, heeded: Sequence[signal.Signals] = ()) -> int:
    """Run the ranks of a node. Returns the exit code. `heeded`: stop signals that are reported to
    the master, which handles them."""
    collect_rarely()
    limit = raise_limit()
    meeting = Path(os.environ.setdefault(MEETING, str(run_dir / SHARED_MEETING)))
    context = zmq.Context()
    try:
        control = _find_master(context, run_dir, meeting)
        recipe = read_recipe(run_dir)
        _prepare_environment(recipe)
    except RlcliError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    members = Members(run_dir, dict(os.environ))
    members.start(process_groups(recipe, plan_topology(recipe)), node)
    facts = {"host": socket.gethostname(), "started": start_time(os.getpid()), "open_files": limit}
    pulse = Pulse(context, control, ("node", node), _end_here, **facts, members=_records(members))
    _report_signals(heeded, pulse)
    used: dict[int, int] = {}
    threading.Thread(target=_watch, args=(pulse, members, used), daemon=True).start()
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    # slow to import: this agent reports to the master first
    from rlcli.messaging.store import RunStore

    store = RunStore(control, context)
    failed = _run_ranks(recipe, run_dir, PrefixStore("agents", store), node, used)
    store.close()
    members.stop()
    pulse.tell_last(HEARD_WITHIN, is_over=True, **failed)
    pulse.close()
    context.term()
    return FAILED if failed else 0


def _report_signals(heeded: Sequence[signal.Signals], pulse: Pulse) -> None:
    """From now on report each of these signals to the master instead of ending."""

    def report(number: int, frame: FrameType | None) -> None:
        pulse.tell(asked_to_stop=number)
        name = signal.Signals(number).name
        print(f"rlcli: {name}: the run ends after its step", file=sys.stderr, flush=True)

    for number in heeded:
        signal.signal(number, report)


def agent_command(run_dir: Path, node: int) -> list[str]:
    """The command that starts the agent of a node."""
    return [sys.executable, "-P", "-m", "rlcli.launch.node", str(run_dir.absolute()), str(node)]


def torchrun_arguments(run_dir: Path, nodes: int, devices_per_node: int, node: int) -> list[str]:
    return [
        f"--nnodes={nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={devices_per_node}",
        "--max-restarts=0",
        "--signals-to-handle=SIGQUIT",
        "--rdzv-backend=rlcli",
        f"--rdzv-id={run_dir.name}",
        f"--log-dir={run_dir / 'logs' / 'torchrun' / f'node{node}'}",
        "-m",
        "rlcli.runtime.worker_main",
        str(run_dir),
    ]


def _find_master(context: zmq.Context[Any], run_dir: Path, meeting: Path) -> Control:
    """Wait for the master. An agent that was started by hand may find what a killed master has
    left; it waits for the next one, which replaces that. Raises HangError."""

    def is_valid(control: Control) -> bool:
        return is_answered(context, control, ANSWERED_WITHIN)

    if not (meeting / CONTROL_FILE).exists():
        absent = "" if run_dir.is_dir() else ", a folder that is not here yet"
        waits = f"waiting up to {BEGUN_WITHIN / 60:.0f} minutes for the first node to begin the run"
        print(f"rlcli: {waits} {run_dir}{absent}", file=sys.stderr, flush=True)
    control = Control.wait_for(meeting, BEGUN_WITHIN)
    if not read_recipe(run_dir).launch.by_hand or is_valid(control):
        return control
    waits = "the first node does not answer; waiting until it is started again"
    print(f"rlcli: {waits}", file=sys.stderr, flush=True)
    return Control.wait_for(meeting, BEGUN_WITHIN, is_valid)


def _prepare_environment(recipe: Recipe) -> None:
    """Set the variables that ranks inherit. Cores are divided among them; variables already set are
    kept, except that gloo listens on no other interface than the run's: it does not ask who
    connects. Raises ResourceError F58."""
    interface = interface_of(recipe)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    ours = {
        "OMP_NUM_THREADS": str(max(1, available_cores() // recipe.cluster.devices_per_node)),
        "OMP_WAIT_POLICY": "PASSIVE",
        # a rank connects to those it exchanges tensors with, not to all others
        "TORCH_GLOO_LAZY_INIT": "1",
        "NCCL_SOCKET_IFNAME": interface,
    }
    os.environ.update({name: value for name, value in ours.items() if name not in os.environ})
    os.environ.update({"PYTHONSAFEPATH": "1", AGENT: str(os.getpid())})


def _run_ranks(
    recipe: Recipe, run_dir: Path, store: Store, node: int, used: Mapping[int, int]
) -> dict[str, Any]:
    """Run the ranks until all have ended. Returns an empty dict if they ended by themselves, else
    what the master must know; `used`: pid → peak memory that was observed."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    api._get_default_signal = lambda: signal.SIGKILL
    nodes = recipe.cluster.nodes
    _meet_in(store, node, nodes)
    kills = MemoryKills()
    try:
        run(parse_args(torchrun_arguments(run_dir, nodes, recipe.cluster.devices_per_node, node)))
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        rank, failure = error.get_first_failure()
        memory = used.get(failure.pid, 0)
        return {
            "rank": rank,
            "exit": failure.exitcode,
            "out_of_memory": kills.happened(),
            "memory": memory,
        }
    except Exception as error:  # torchrun's own
        traceback.print_exc()
        return {"failure": f"{type(error).__name__}: {error}"}
    return {}


def _meet_in(store: Store, node: int, nodes: int) -> None:
    """Make agents find each other through the run's store;
    each has the number that it was given."""
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousParameters,
        RendezvousStoreInfo,
        rendezvous_handler_registry,
    )

    class Meeting(RendezvousHandler):
        def __init__(self, parameters: RendezvousParameters):
            self._run_id = parameters.run_id

        def next_rendezvous(self) -> RendezvousInfo:
            nobody = RendezvousStoreInfo("127.0.0.1", 0)  # ranks are given a store of their own
            return RendezvousInfo(store, node, nodes, nobody)

        def get_backend(self) -> str:
            return "rlcli"

        def get_run_id(self) -> str:
            return self._run_id

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            """Do nothing: nobody joins later."""

        def num_nodes_waiting(self) -> int:
            return 0

        def shutdown(self) -> bool:
            return True

        @property
        def use_agent_store(self) -> bool:
            return False

    rendezvous_handler_registry.register("rlcli", Meeting)


def _watch(pulse: Pulse, members: Members, used: dict[int, int]) -> None:
    """Report each rank that has ended, including with exit code 0, which torchrun does not report,
    and the members. Record how much memory each has `used`."""
    seen, gone, members_known, restarted = (
        set[int](),
        set[int](),
        _records(members),
        list[Restart](),
    )
    while True:
        time.sleep(LOOK_SECONDS)
        alive = _living_children()
        seen |= alive
        used.update({pid: max(memory_in_use(pid), used.get(pid, 0)) for pid in alive})
        if seen - alive != gone:
            gone = seen - alive
            pulse.tell(gone=sorted(gone))
        if (members_now := _records(members)) != members_known:
            members_known = members_now
            pulse.tell(members=members_known)
        if again := members.new_restarts():
            restarted += again
            pulse.tell(restarts=list(restarted))
        if deaths := members.deaths():
            names = ", ".join(f"{death.group}{death.index} {death}" for death in deaths)
            pulse.tell(failure=f"{names}, {REPLACEMENTS + 1} times")


def _living_children() -> set[int]:
    """The numbers of this process's children that have not ended."""
    import psutil

    alive = set[int]()
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # another thread may have reaped it just now
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.add(process.pid)
    return alive


def _records(members: Members) -> dict[str, tuple[int, str | None]]:
    """Name → pid and start time."""
    return {
        f"{name}{index}": (pid, start_time(pid)) for (name, index), pid in members.pids().items()
    }


def _end_here(why: str) -> None:
    """End this process at once; its ranks die with it."""
    print(f"rlcli: {why}; this node ends", file=sys.stderr, flush=True)
    os._exit(FAILED if why == END else LOST)


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    # a launcher, `nohup` and others leave it none of those that it is not to heed
    heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, signal.SIG_DFL)  # no traceback after Ctrl-C while it waits for a run
    code = main(Path(arguments[0]).absolute(), int(arguments[1]), heeded)
    leave_garbage()
    sys.exit(code)
