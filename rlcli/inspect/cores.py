"""How many processor cores a run may use: in a container or a job often fewer than the machine
has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlcli.inspect.control_groups import MEMBERSHIP, ROOT, ControlGroup, control_groups
from rlcli.processes import allowed_cores


def available_cores(environment: Mapping[str, str] = os.environ) -> int:
    """The smallest of: the cores in our affinity mask, the control group's CPU quota, and what
    Slurm gave the task."""
    limits = [float(allowed_cores()), *_quotas(MEMBERSHIP, ROOT)]
    of_task = environment.get("SLURM_CPUS_PER_TASK", "")
    if of_task.isdecimal():
        limits.append(float(of_task))
    return max(1, int(min(limits)))


def _quotas(membership: Path, root: Path) -> Iterator[float]:
    """The CPU quota, in cores, of each control group (v1 or v2) that this process is in."""
    for group in control_groups("cpu", membership, root):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            yield _quota_v2(group) if group.version == 2 else _quota_v1(group)


def _quota_v2(group: ControlGroup) -> float:
    limit, period = (group.folder / "cpu.max").read_text().split()
    return int(limit) / int(period)  # "max" raises ValueError: no limit


def _quota_v1(group: ControlGroup) -> float:
    limit = group.number("cpu.cfs_quota_us")
    if limit < 0:
        raise ValueError("no limit")
    return limit / group.number("cpu.cfs_period_us")
