"""What tests of components share."""

import sys

import pytest

from rlcli import registry
from rlcli.api.component import registered


@pytest.fixture
def forgotten(tmp_path):
    """Components that are imported from the test's folder are forgotten afterwards."""
    tables = {kind: dict(registered(kind)) for kind in registry.KINDS}
    yield
    for kind, table in tables.items():
        registered(kind).clear()
        registered(kind).update(table)
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", None)):
            del sys.modules[name]
