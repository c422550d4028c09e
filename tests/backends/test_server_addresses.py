"""The address of this machine at which a server joins the group that sends weights to it."""

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from rlcli.backends._server_process import _address_towards
from rlcli.backends._sglang_group import _WeightGroup


class Joining:
    """A server that joins the group as SGLang does."""

    def post(self, path, body, seconds):
        if path == "/init_weights_update_group":
            address = body["master_address"]
            store = dist.TCPStore(
                address, body["master_port"], is_master=False, timeout=timedelta(seconds=seconds)
            )
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            name = body["group_name"]
            prefixed = dist.PrefixStore(
                "cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
            )
            self.group = dist.ProcessGroupGloo(prefixed, 1, 2, options)


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_a_server_joins_at_an_address_of_its_own_family(loopback):
    try:
        socket.create_server(
            (loopback, 0), family=socket.AF_INET6 if ":" in loopback else 2
        ).close()
    except OSError:
        pytest.skip(f"this machine has no {loopback}")
    address = _address_towards(loopback)
    assert address == loopback
    server = Joining()
    group = _WeightGroup(server, 1, address, 20.0)
    assert (group._group.size(), server.group.rank()) == (2, 1)
    group.close()


def test_a_host_with_addresses_of_both_families_is_reached_by_ipv4(monkeypatch):
    both = [
        (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("::1", 9, 0, 0)),
        (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", 9)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: both)
    assert _address_towards("server") == "127.0.0.1"
