"""megatron holds to the contract in every layout, on a pretend device; `test_megatron.py` has what is its own."""

from contextlib import contextmanager

import pytest

from rlcli.testing.backend import BackendContract
from rlcli.testing.pretend_cuda import pretend_cuda

pytest.importorskip("megatron.core")


class TestContract(BackendContract):
    name = "megatron"
    families = ("llama", "qwen3", "mistral", "qwen2")
    device = "cuda:0"
    rank_seconds = 100

    @contextmanager
    def at_device(self):
        with pretend_cuda():
            yield
