"""megatron holds to the contract in every layout, on a pretend device; `test_megatron.py` has what is its own."""

from contextlib import contextmanager

import pytest

from rlcli.testing.backend import BackendContract
from rlcli.testing.pretend_cuda import pretend_cuda

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.timeout(900)  # ranks that wait for each other are found by the contract itself


class TestContract(BackendContract):
    name = "megatron"
    families = ("llama", "qwen3", "mistral", "qwen2")
    device = "cuda:0"
    rank_seconds = 200

    @contextmanager
    def at_device(self):
        with pretend_cuda():
            yield
