"""The contract of interfaces: what every one of them must do, whatever its algorithm.

A test file of your own is

    class TestContract(InterfaceContract):
        name = "my-interface"
        args = {"beta": 0.1}

with tests beside it of what no general check can know: that the loss is the one of the paper.
"""

from __future__ import annotations

from rlcli.testing.interface.edges import EdgeChecks
from rlcli.testing.interface.general import GeneralChecks
from rlcli.testing.interface.generation import GenerationChecks
from rlcli.testing.interface.inference import InferenceChecks
from rlcli.testing.interface.invariance import InvarianceChecks
from rlcli.testing.interface.laws import LawChecks
from rlcli.testing.interface.learning import LearningChecks
from rlcli.testing.interface.real_model import RealModelChecks
from rlcli.testing.interface.reward import RewardChecks
from rlcli.testing.interface.training import TrainingChecks


class InterfaceContract(
    RealModelChecks,
    RewardChecks,
    GenerationChecks,
    InferenceChecks,
    EdgeChecks,
    LawChecks,
    LearningChecks,
    InvarianceChecks,
    TrainingChecks,
    GeneralChecks,
):
    """All checks, run from the last base to the first. An interface skips those of what it does not do."""


__all__ = ["InterfaceContract"]
