"""What the tests of this folder share."""

import pytest

from rlcli.messaging import pulse, store


@pytest.fixture(autouse=True)
def _short_ticks(monkeypatch):
    """Threads of a connection notice sooner that it is closed, for which each test waits."""
    monkeypatch.setattr(pulse, "TICK", 0.02)
    monkeypatch.setattr(store, "TICK", 0.02)
