"""A master to whose sockets others send what they like: its memory stays what it is."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from rlcli.launch.meeting import meeting_folder
from rlcli.messaging.control import Control

BUSY_MASTER = """
import sys
from pathlib import Path
from rlcli.messaging.zmq_master import ZmqMaster

ZmqMaster(Path(sys.argv[1]), 1, lambda patience: None, *sys.argv[2:])
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=[[], ["127.0.0.1"]], ids=["in a folder", "by TCP"])
def busy_master(request):
    """A master that reads nothing, in a process of its own;
    returns what a worker of it must know, and its memory."""
    meeting = meeting_folder()
    home = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY_MASTER, str(meeting.path), *request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": home},
    )
    assert process.stdout.readline() == b"up\n"

    def resident():
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) << 10

    yield Control.read(meeting.path), resident
    process.kill()
    process.communicate()
    meeting.close()


def flood_without_the_key(told):
    """Well-formed messages, 400 MiB of them."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(told.requests)
        for _ in range(100):
            try:
                stranger.send(b"x" * (4 << 20), zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.01)
        time.sleep(1)


def flood_with_the_masters_key_alone(told):
    """400 MiB from one who has seen the master's public key, and has no key of the run."""
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.curve_serverkey, stranger.curve_publickey, stranger.curve_secretkey = (
            told.key.encode(),
            public,
            secret,
        )
        stranger.connect(told.pulses)
        for _ in range(100):
            try:
                stranger.send(b"x" * (4 << 20), zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.01)
        time.sleep(1)


def raw_address(address):
    if address.startswith("ipc://"):
        return address.removeprefix("ipc://")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def flood_below_zeromq(told):
    """Greetings, and after them a frame of 60 MiB that never ends, on many connections."""
    connections = []
    for mechanism in (b"NULL", b"CURVE") * 8:
        connection = socket.socket(socket.AF_INET if told.is_remote else socket.AF_UNIX)
        connection.settimeout(2)
        connections.append(connection)
        try:
            connection.connect(raw_address(told.requests))
            connection.sendall(
                b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
            )
            time.sleep(0.02)
            connection.sendall(b"\x06" + (60 << 20).to_bytes(8, "big") + b"\x05HELLO")
            for _ in range(22):
                connection.sendall(b"x" * (1 << 20))
        except OSError:  # it was shut, as it should be
            continue
    time.sleep(1)
    for connection in connections:
        connection.close()


FLOODS = [flood_without_the_key, flood_with_the_masters_key_alone, flood_below_zeromq]


@pytest.mark.long
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_strangers_takes_no_memory(busy_master, flood):
    told, resident = busy_master
    before = resident()
    flood(told)
    assert resident() - before < 16 << 20
