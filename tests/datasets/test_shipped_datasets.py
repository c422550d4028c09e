"""Every built-in dataset fulfils the contract for the example rows of its class."""

import pytest

from rlcli.registry import names
from rlcli.testing.dataset import DatasetContract


@pytest.mark.parametrize("name", names("datasets"))
class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def named(self, name):
        self.name = name
