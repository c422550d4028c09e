"""vllm: the contract over a fake server with a real model."""

import pytest
from attached_engines import Attached
from server_kinds import VLLM

from rlcli.testing.backend.base import FAMILIES


@pytest.mark.long
class TestContract(Attached):
    server_kind, name = VLLM, VLLM.name
    families = ("llama",)
    update = "disk"


@pytest.mark.exhaustive
class TestContractOfAllFamilies(TestContract):
    families = FAMILIES


@pytest.mark.exhaustive
class TestContractOfTwoServers(TestContract):
    servers = 2
