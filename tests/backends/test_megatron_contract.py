"""megatron fulfils the contract in every layout, on a pretend device; its specifics are in
`test_megatron.py`."""

import pytest

from rlcli.testing.backend import BackendContract

pytest.importorskip("megatron.core")
# ranks that wait for each other are found by the contract itself
pytestmark = pytest.mark.timeout(900)


class TestContract(BackendContract):
    name = "megatron"
