"""Free ports of this machine."""

import socket

import pytest

from rlcli.api import network
from rlcli.api.network import free_port


@pytest.fixture
def candidates(monkeypatch):
    """Three free ports, and no others."""
    ports = [free_port() for _ in range(3)]
    monkeypatch.setattr(network, "CANDIDATES", ports)
    return ports


def test_a_free_port_is_none_that_the_system_gives_to_connections():
    first, last = map(int, network.PORTS_OF_CONNECTIONS.read_text().split())
    for _ in range(20):
        port = free_port()
        assert not first <= port <= last
        socket.create_server(("127.0.0.1", port)).close()


def test_ports_that_are_in_use_are_passed_over(candidates):
    first, second, third = candidates
    with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", second)):
        assert {free_port() for _ in range(10)} == {third}


@pytest.mark.parametrize("text", ["1024 65535", "10000 40000"])
def test_where_connections_may_get_every_port_any_free_one_is_used(monkeypatch, tmp_path, text):
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(network, "PORTS_OF_CONNECTIONS", tmp_path / "range")
    socket.create_server(("127.0.0.1", free_port())).close()
