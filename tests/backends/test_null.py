"""null: the contract; checks that need an engine are skipped."""

from rlcli.testing.backend import BackendContract


class TestContract(BackendContract):
    name = "null"
