"""How many processor cores a run may use: in a container or a job often fewer than the machine
has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rlcli.processes import allowed_cores

CGROUPS = Path("/sys/fs/cgroup")


def available_cores(environment: Mapping[str, str] = os.environ) -> int:
    """The smallest of: the cores in our affinity mask, the control group's CPU quota, and what
    Slurm gave the task."""
    limits = [float(allowed_cores()), *_quotas(Path("/proc/self/cgroup"), CGROUPS)]
    of_task = environment.get("SLURM_CPUS_PER_TASK", "")
    if of_task.isdecimal():
        limits.append(float(of_task))
    return max(1, int(min(limits)))


def _quotas(membership: Path, root: Path) -> Iterator[float]:
    """The CPU quota, in cores, of each control group (v1 or v2) that this process is in."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            yield from _limits_of(root, group, _quota_v2)
        elif "cpu" in controllers.split(","):
            yield from _limits_of(root / "cpu", group, _quota_v1)


def _limits_of(root: Path, group: str, quota: Callable[[Path], float]) -> Iterator[float]:
    """Quotas of a group and of those of its parents that are visible: in a container the outer ones
    are not."""
    folder = root / group.lstrip("/")
    while folder == root or root in folder.parents:
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            yield quota(folder)
        folder = folder.parent


def _quota_v2(folder: Path) -> float:
    limit, period = (folder / "cpu.max").read_text().split()
    return int(limit) / int(period)  # "max" raises ValueError: no limit


def _quota_v1(folder: Path) -> float:
    limit = int((folder / "cpu.cfs_quota_us").read_text())
    if limit < 0:
        raise ValueError("no limit")
    return limit / int((folder / "cpu.cfs_period_us").read_text())
