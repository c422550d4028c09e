"""null: the contract; all that needs an engine is skipped."""

from rlcli.testing.backend import BackendContract


class TestContract(BackendContract):
    name = "null"
