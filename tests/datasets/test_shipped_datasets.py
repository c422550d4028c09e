"""Every built-in dataset keeps the contract, on the rows that its class shows."""

import pytest

from rlcli.registry import names
from rlcli.testing.dataset import DatasetContract


@pytest.mark.parametrize("name", names("datasets"))
class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def named(self, name):
        self.name = name
