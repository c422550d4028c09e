"""The processes of a run of this process's own forks, for tests that kill one of them."""

import contextlib
import os
import random
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil

MODULES = {"rlcli.runtime.pool": "pool", "sglang.launch_server": "server"}
EPISODES = "_environment_host.py"
FATAL = ("master", "node", "rank")
"""What a run cannot go on without."""
ONCE = {"environment": "environments", "environments": "environment"}
"""Both fail the same episodes, which may fail once."""


def processes_of(run: int) -> dict[str, list[psutil.Process]]:
    """Kind → the processes of a run that may be killed. `run`: the pid of its master."""
    master = psutil.Process(run)
    kinds = defaultdict(list, {"master": [master]})
    for process in master.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if kind := _kind(process, master):
                kinds[kind].append(process)
    return dict(kinds)


def _kind(process: psutil.Process, master: psutil.Process) -> str | None:
    command, parent = process.cmdline(), process.parent()
    if parent is None:
        return None
    if any(word.endswith(EPISODES) for word in command):
        return "environment" if parent.cmdline() == command else "environments"
    if command == master.cmdline():
        return "node" if parent == master else "rank"
    if any(word.endswith("/settings.yaml") and Path(word).exists() for word in command):
        return None  # a server that is not ready: a run does not start it twice
    return next((MODULES[word] for word in command if word in MODULES), None)


def disturb(run: int, seconds: float, counts: Counter[str], draws: random.Random) -> list[str]:
    """Kill processes of a run, each within so many seconds, until one that it needs is gone or it
    has ended. Returns their kinds, those of the smallest `counts` first; none occurs twice, because
    what fails twice is given up."""
    killed: list[str] = []
    while not killed or killed[-1] not in FATAL:
        if _ends_within(run, draws.uniform(0, seconds)):
            break
        kinds = processes_of(run)
        allowed = kinds.keys() - killed - {ONCE.get(kind) for kind in killed}
        rarest = min(counts[kind] for kind in allowed)
        kind = draws.choice(sorted(kind for kind in allowed if counts[kind] == rarest))
        with contextlib.suppress(psutil.NoSuchProcess):
            draws.choice(kinds[kind]).kill()
            killed.append(kind)
    return killed


def _ends_within(run: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitid(os.P_PID, run, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        time.sleep(0.005)
    return False
