"""Whoever reaches the interface of a run can connect to the ports over which its ranks exchange
tensors."""

import json
import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

pytestmark = pytest.mark.timeout(420)

FILES = 400
"""A limit of open files that suffices for two ranks, and that strangers can use up."""

GROUP_OF_ONE = """
import psutil
from rlcli.backends._process_group import process_group

with process_group():
    for connection in psutil.Process().net_connections():
        print(connection.laddr.ip)
"""

STRANGER = """
import os, socket, sys
from datetime import timedelta
import psutil, torch
import torch.distributed as dist
from rlcli.errors import ProjectError
from rlcli.messaging.messages import Failure

rank = 0 if os.fork() else 1
store = dist.FileStore(sys.argv[1], 2)
ranks = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=30)}
dist.init_process_group("gloo", store=store, **ranks)
for connection in psutil.Process().net_connections():
    for number in range(8) if connection.status == psutil.CONN_LISTEN else ():
        with socket.create_connection(connection.laddr) as stranger:
            stranger.sendall(number.to_bytes(8, "little"))  # with which a rank begins
store.set(f"strangers of rank {rank}", "")
store.wait(["strangers of rank 0", "strangers of rank 1"])
try:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise ProjectError("in a component") from error
except ProjectError as error:
    failure = Failure.of(error, f"rank {rank}", "")
    print(failure.kind, failure.code, failure.is_unexpected, failure.message, flush=True)
if rank == 0:
    os.wait()
"""


def tensor_ports(process):
    """The ports on which a rank listens, with their addresses."""
    return [one.laddr for one in process.net_connections() if one.status == psutil.CONN_LISTEN]


def ranks_of(run):
    processes = json.loads((run / "procs.json").read_text())
    return [psutil.Process(one["pid"]) for one in processes if one["name"].startswith("rank")]


def open_many_connections(address, connections):
    with suppress(OSError):
        for _ in range(FILES):
            connections.append(socket.create_connection(address, timeout=0.5))


def connect_and_send(address, text, connections):
    connection = socket.create_connection(address)
    connection.sendall(text)
    connections.append(connection)


def steps_done(project):
    return len((project / "run/metrics.jsonl").read_text().splitlines())


@pytest.fixture
def connections():
    opened = []
    yield opened
    for connection in opened:
        connection.close()


def test_ranks_listen_only_on_the_interface_of_the_run(endless, monkeypatch, project):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    endless("--quiet", "launch=local", "cluster.devices_per_node=2")
    addresses = {address.ip for rank in ranks_of(project / "run") for address in tensor_ports(rank)}
    assert addresses == {"127.0.0.1"}


def test_junk_sent_to_its_ports_does_not_disturb_a_run(endless, connections, project):
    process = endless("--quiet", "launch=local", "cluster.devices_per_node=2")
    for address in [
        address for rank in ranks_of(project / "run") for address in tensor_ports(rank)
    ]:
        for junk in (b"x", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
            connect_and_send(address, junk, connections)
    before, deadline = steps_done(project), time.monotonic() + 200
    while steps_done(project) < before + 20:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.exhaustive
def test_exhausted_descriptors_are_reported_with_their_likely_cause(endless, connections, project):
    process = endless("--quiet", "launch=local", "cluster.devices_per_node=2")
    ranks = ranks_of(project / "run")
    for rank in ranks:
        resource.prlimit(rank.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
    for address in [address for rank in ranks for address in tensor_ports(rank)]:
        open_many_connections(address, connections)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 7, errors
    # two threads that fail at once may leave no other word
    recursively = "terminate called recursively" in errors
    assert recursively or "it had no descriptors left (ulimit -n)" in errors
    assert "another program may have connected to its ports on lo" in errors


@pytest.mark.long
def test_a_group_of_one_process_listens_on_the_loopback(tmp_path):
    """Libraries that require a group get one; its port is on the address of the host's name unless
    told otherwise."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
    done = subprocess.run(
        [sys.executable, "-c", GROUP_OF_ONE], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, set(done.stdout.split())) == (0, {"127.0.0.1"}), done.stderr


@pytest.mark.exhaustive
def test_who_takes_the_place_of_a_rank_on_its_port_is_suspected_and_no_component(tmp_path):
    """The connection of a rank that others begin before it does is theirs."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_GLOO_LAZY_INIT": "1"}
    command = [sys.executable, "-c", STRANGER, tmp_path / "store"]
    ranks = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    lines = ranks.stdout.splitlines()
    assert lines, ranks.stderr
    for line in lines:
        assert line.startswith(
            "WorkerError F09 True tensors could not be exchanged with another rank: "
        ), line
        assert "GLHF" not in line
