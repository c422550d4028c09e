"""The memory that a run has in a container or a job."""

from types import SimpleNamespace

import psutil
import pytest

from rlcli.inspect import host_memory as of_host
from rlcli.inspect import machine
from rlcli.inspect.control_groups import MemoryLimit, memory_limits
from rlcli.inspect.host_memory import host_memory

GIB = 1 << 30


@pytest.fixture
def limits(tmp_path):
    """The limits of a process by its membership and the files of its groups."""

    def read(membership, files):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{content}\n")
        (tmp_path / "membership").write_text(membership)
        return [*memory_limits(tmp_path / "membership", tmp_path)]

    return read


def group(folder, limit, used=5, inactive=2):
    """The files of a group of version 2."""
    names = {"max": limit, "current": used, "stat": f"anon 1\ninactive_file {inactive}"}
    return {f"{folder}memory.{name}": content for name, content in names.items()}


def test_the_limits_of_a_group_and_of_those_above_it_are_read(limits):
    job = {**group("job/task/", "max"), **group("job/", 16), **group("", 64, used=90, inactive=0)}
    assert limits("0::/job/task\n", job) == [MemoryLimit(16, 3), MemoryLimit(64, 90)]
    assert [limit.free for limit in limits("0::/job/task\n", job)] == [13, 0]


def test_the_limits_of_groups_of_version_1_are_read(limits):
    files = {
        "memory/docker/x/memory.limit_in_bytes": 16,
        "memory/docker/x/memory.usage_in_bytes": 5,
        "memory/docker/x/memory.stat": "cache 4\ntotal_inactive_file 2",
    }
    assert limits("4:memory:/docker/x\n0::/\n", files) == [MemoryLimit(16, 3)]


@pytest.mark.parametrize("membership", ["", "0::/\n", "0::/../outside\n"])
def test_there_is_no_limit_where_none_is_visible(limits, membership):
    assert limits(membership, {}) == []


def test_the_memory_of_a_job_is_that_of_its_group(monkeypatch):
    of_machine = SimpleNamespace(total=512 * GIB, available=500 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: of_machine)
    of_job = [MemoryLimit(16 * GIB, 4 * GIB), MemoryLimit(1 << 63, GIB)]
    monkeypatch.setattr(of_host, "memory_limits", lambda: of_job)
    assert machine._check_memory().says == "12.0 GiB of 16.0 GiB available"
    assert host_memory().total == 16 * GIB
    of_job.clear()
    assert host_memory().total == 512 * GIB
