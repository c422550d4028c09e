"""Out-of-memory kills by the kernel: how they are detected,
and what the memory plan had expected."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.errors import RlcliError
from rlcli.files import known_object

if TYPE_CHECKING:
    from rlcli.observe.run_directory import RunDirectory
    from rlcli.recipe.resolve import Resolved

log = logging.getLogger(__name__)

ESTIMATE = "memory.json"
"""File in a run's folder with the peak of its memory plan."""
GIB = 2**30


class MemoryKills:
    """Whether the kernel has killed a process of our control group since this object was
    created."""

    def __init__(self) -> None:
        self._before = count_memory_kills()

    def happened(self) -> bool | None:
        """None if the kernel does not count such kills."""
        after = count_memory_kills()
        return after > self._before if after is not None and self._before is not None else None


def count_memory_kills(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Processes of our control group that the kernel killed because memory ran out;
    None if it does not count them."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        group = next(
            line[3:] for line in membership.read_text().splitlines() if line.startswith("0::")
        )
        for line in (root / group.lstrip("/") / "memory.events").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def memory_in_use(pid: int) -> int:
    """Bytes of memory that a process currently holds; 0 if it is gone."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def write_estimate(run: RunDirectory, resolved: Resolved) -> None:
    """Write the peak of the memory plan. Models of unknown size have none."""
    from rlcli.inspect.processor import as_run_here
    from rlcli.topology.report import make_plan

    try:
        plan = make_plan(replace(resolved, recipe=as_run_here(resolved.recipe)))
    except RlcliError as error:
        log.debug("there is no memory plan: %s", error)
        return
    if plan.memory.peaks:
        peak = max(plan.memory.peaks, key=lambda candidate: candidate.total)
        estimate = {
            "device": plan.topology.device,
            "bytes": peak.total,
            "within_percent": peak.within_percent,
            "call": peak.call,
            "phase": peak.phase,
        }
        run.write_text(ESTIMATE, json.dumps(estimate, indent=2) + "\n")


def explain_kill(code: int, out_of_memory: bool | None, used: int, run_dir: Path | None) -> str:
    """Text to add about a process that ended with this exit code, if memory may be the reason: what
    it held, and what the plan had expected. Empty otherwise."""
    if -code != signal.SIGKILL or out_of_memory is False:
        return ""
    facts = [f"it held {used / GIB:.2f} GiB when last seen"] if used else []
    estimate = known_object(run_dir / ESTIMATE) if run_dir is not None else {}
    size, percent = estimate.get("bytes"), estimate.get("within_percent")
    if isinstance(size, int) and isinstance(percent, int):
        if estimate.get("device") == "cpu":
            where = f"{estimate.get('call')}, {estimate.get('phase')}"
            facts.append(
                f"the memory plan has at most {size / GIB:.2f} GiB for it, within "
                f"{percent} % ({where})"
            )
            facts.append("with a smaller train.max_tokens_per_microbatch it needs less")
        else:
            facts.append("the memory plan covers device memory, not host memory")
    return f"; {'; '.join(facts)}" if facts else ""
