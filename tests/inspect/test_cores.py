"""How many cores a run uses: those available to it, also in a container or a job."""

import os

import pytest

from rlcli.inspect import cores
from rlcli.inspect.cores import available_cores


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 64 cores with given control groups: files below /sys/fs/cgroup,
    and the group of this process."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))

    def make(membership, files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        (tmp_path / "membership").write_text(membership)
        quotas = cores._quotas
        monkeypatch.setattr(cores, "_quotas", lambda *_: quotas(tmp_path / "membership", tmp_path))

    return make


@pytest.mark.parametrize(("membership", "files", "expected"), [
    ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
    ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
    ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),
    ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
    ("0::/job/step\n", {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "300000 100000\n"}, 3),
    ("0::/not/seen/here\n", {"cpu.max": "200000 100000\n"}, 2),
    ("0::/../outside\n", {}, 64),
    ("4:cpu,cpuacct:/docker/x\n",
     {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
     64),
    ("0::/\n", {"cpu.max": "nonsense\n"}, 64),
])  # fmt: skip
def test_cores_are_limited_by_the_quota_of_the_control_group(machine, membership, files, expected):
    machine(membership, files)
    assert available_cores({}) == expected


@pytest.mark.parametrize(
    ("cores_of_task", "expected"), [("8", 8), ("128", 64), ("", 64), ("eight", 64), ("0", 1)]
)
def test_cores_are_limited_by_the_slurm_task(machine, cores_of_task, expected):
    machine("0::/\n", {})
    assert available_cores({"SLURM_CPUS_PER_TASK": cores_of_task}) == expected


def test_cores_are_limited_by_the_cpu_affinity(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert available_cores({}) == 1
