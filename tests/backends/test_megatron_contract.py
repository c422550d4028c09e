"""megatron fulfils the contract in every layout, on a pretend device; its specifics are in
`test_megatron.py`."""

import pytest

from rlcli.testing.backend import BackendContract

pytest.importorskip("megatron.core")
# ranks that wait for each other are found by the contract itself
pytestmark = pytest.mark.timeout(900)


class TestContract(BackendContract):
    name = "megatron"
    layouts_with_experts = (
        *BackendContract.layouts_with_experts,
        ({"dp": 2, "tp": 2, "ep": 2}, {}),
    )
    layouts_with_router_losses = (*BackendContract.layouts_with_router_losses, {"tp": 2})
    layouts_with_replay = (
        *BackendContract.layouts_with_replay,
        ({"tp": 2}, {"gradient_checkpointing": True, "recompute": "selective"}),
    )
