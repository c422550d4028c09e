"""Fixtures shared by tests of components."""

import sys

import pytest

from rlcli import registry
from rlcli.api.component import registered


@pytest.fixture
def unregistered_afterwards(tmp_path):
    """Components imported from the folder of the test are unregistered afterwards; others stay
    registered, because their modules stay imported."""
    yield
    modules = {
        name
        for name, module in sys.modules.items()
        if str(tmp_path) in str(getattr(module, "__file__", None))
    }
    for table in map(registered, registry.KINDS):
        for name in [name for name, cls in table.items() if cls.__module__ in modules]:
            del table[name]
    for name in modules:
        del sys.modules[name]
