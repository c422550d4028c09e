"""megatron holds to the contract on one rank, on a pretend device; `test_megatron.py` has the layouts."""

from contextlib import contextmanager

import pytest

from rlcli.testing.backend.declaration import DeclarationChecks
from rlcli.testing.backend.forward import ForwardChecks
from rlcli.testing.backend.optimizer import OptimizerChecks
from rlcli.testing.backend.state import StateChecks
from rlcli.testing.backend.training import TrainingChecks
from rlcli.testing.pretend_cuda import pretend_cuda

pytest.importorskip("megatron.core")


class TestContract(StateChecks, OptimizerChecks, TrainingChecks, ForwardChecks, DeclarationChecks):
    name = "megatron"
    families = ("llama", "qwen3", "mistral", "qwen2")
    device = "cuda:0"

    @contextmanager
    def at_device(self):
        with pretend_cuda():
            yield
