"""deepspeed: the contract under ZeRO 1; what ranks do under the other stages."""

from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.ranks import RanksChecks
from rlcli.testing.backend.training import TrainingChecks


class TestStage1(BackendContract):
    name = "deepspeed"
    args = {"zero_stage": 1}


class TestStage0(RanksChecks, TrainingChecks):
    name = "deepspeed"
    args = {"zero_stage": 0}
    families = ("llama",)


class TestStage2(RanksChecks, TrainingChecks):
    name = "deepspeed"
    args = {"zero_stage": 2}
    families = ("llama",)


class TestStage3(BackendContract):
    name = "deepspeed"
    args = {"zero_stage": 3}
