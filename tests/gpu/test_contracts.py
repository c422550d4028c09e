"""Every engine fulfils its contract on a GPU: losses, gradients, updates, scores, samples and
checkpoints equal those of a plain loop over transformers' model on the CPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from pretend_cuda import pretend_cuda

from rlcli.testing.backend.declaration import DeclarationChecks
from rlcli.testing.backend.forward import ForwardChecks
from rlcli.testing.backend.generation import BackendGenerationChecks
from rlcli.testing.backend.optimizer import OptimizerChecks
from rlcli.testing.backend.state import StateChecks
from rlcli.testing.backend.streams import StreamChecks
from rlcli.testing.backend.training import BackendTrainingChecks

# an engine's first use of a GPU may compile kernels
pytestmark = pytest.mark.timeout(900)


class OnGPU(
    StateChecks,
    StreamChecks,
    BackendGenerationChecks,
    OptimizerChecks,
    BackendTrainingChecks,
    ForwardChecks,
    DeclarationChecks,
):
    """The contract with its engines on the first GPU, without its checks of several ranks: these
    fork, which CUDA does not allow. `test_ranks.py` has ranks over NCCL."""

    __test__ = False
    device = "cuda:0"

    @pytest.fixture(autouse=True)
    def _at_device(self, device_name):
        self.is_emulated = device_name == "cpu"
        with self.at_device():
            yield

    def at_device(self):
        return pretend_cuda() if self.is_emulated else nullcontext()


class TestFSDP(OnGPU):
    __test__ = True
    name = "fsdp"
    families = ("llama", "gpt2", "mistral", "gemma2", "qwen3")


class TestInference(OnGPU):
    __test__ = True
    name = "inference"
    families = ("llama", "gpt2", "mistral", "gemma2", "qwen3")


class TestDeepSpeedStage1(OnGPU):
    __test__ = True
    name = "deepspeed"
    args = {"zero_stage": 1}
    families = ("llama", "gpt2")


class TestDeepSpeedStage3(OnGPU):
    __test__ = True
    name = "deepspeed"
    args = {"zero_stage": 3}
    families = ("llama",)


class TestMegatron(OnGPU):
    __test__ = True
    name = "megatron"
