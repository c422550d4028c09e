"""Every built-in dataset whose libraries are installed fulfils the contract for the example rows of
its class."""

import pytest

from rlcli.registry import names, signature
from rlcli.registry.requirements import missing_libraries
from rlcli.testing.dataset import DatasetContract

INSTALLED = [
    name for name in names("datasets") if not any(missing_libraries(signature("datasets", name)))
]


@pytest.mark.parametrize("name", INSTALLED)
class TestContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def named(self, name):
        self.name = name
