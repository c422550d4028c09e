"""The processor cores that a run may really use, which a container or a job may have fewer of than the machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def available_cores(environment: Mapping[str, str] = os.environ) -> int:
    """The least of: the cores we may run on, the share of time that the control group has, what Slurm gave the task."""
    limits = [float(_allowed()), *_quotas(Path("/proc/self/cgroup"), CGROUPS)]
    given = environment.get("SLURM_CPUS_PER_TASK", "")
    if given.isdecimal():
        limits.append(float(given))
    return max(1, int(min(limits)))


def _allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas(membership: Path, root: Path) -> Iterator[float]:
    """Cores' worth of time that each control group around this process may use, in both versions of them."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            yield from _limits_of(root, place, _quota_v2)
        elif "cpu" in controllers.split(","):
            yield from _limits_of(root / "cpu", place, _quota_v1)


def _limits_of(root: Path, place: str, quota: Callable[[Path], float]) -> Iterator[float]:
    """Of a group and those around it; in a container the outer ones cannot be seen."""
    folder = root / place.lstrip("/")
    while folder == root or root in folder.parents:
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            yield quota(folder)
        folder = folder.parent


def _quota_v2(folder: Path) -> float:
    limit, period = (folder / "cpu.max").read_text().split()
    return int(limit) / int(period)  # "max" is no number: ValueError, no limit


def _quota_v1(folder: Path) -> float:
    limit = int((folder / "cpu.cfs_quota_us").read_text())
    if limit < 0:
        raise ValueError("no limit")
    return limit / int((folder / "cpu.cfs_period_us").read_text())
