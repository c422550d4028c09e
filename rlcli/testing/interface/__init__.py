"""The contract of interfaces: what every one of them must do, whatever its algorithm.

Your own test file is

    class TestContract(InterfaceContract):
        name = "my-interface"
        args = {"beta": 0.1}

plus tests of what no general check can know: for example, that the loss is the one in the paper.
"""

from __future__ import annotations

from rlcli.testing.interface.advantages import AdvantageChecks
from rlcli.testing.interface.arguments import ArgumentChecks
from rlcli.testing.interface.credit import CreditChecks
from rlcli.testing.interface.described_arguments import DescribedArgumentChecks
from rlcli.testing.interface.directions import DirectionChecks
from rlcli.testing.interface.edge_cases import EdgeChecks
from rlcli.testing.interface.equal_weights import EqualWeightChecks
from rlcli.testing.interface.general import GeneralChecks
from rlcli.testing.interface.generation import GenerationChecks
from rlcli.testing.interface.heads import HeadChecks
from rlcli.testing.interface.inference import InferenceChecks
from rlcli.testing.interface.invariants import LawChecks
from rlcli.testing.interface.layouts import InvarianceChecks
from rlcli.testing.interface.learning import LearningChecks
from rlcli.testing.interface.metrics import MetricChecks
from rlcli.testing.interface.prompts import PromptChecks
from rlcli.testing.interface.real_model import RealModelChecks
from rlcli.testing.interface.reward import RewardChecks
from rlcli.testing.interface.training import TrainingChecks
from rlcli.testing.interface.twin import TwinChecks
from rlcli.testing.interface.variants import VariantChecks


class InterfaceContract(
    RealModelChecks,
    VariantChecks,
    TwinChecks,
    RewardChecks,
    GenerationChecks,
    HeadChecks,
    InferenceChecks,
    CreditChecks,
    AdvantageChecks,
    ArgumentChecks,
    EdgeChecks,
    EqualWeightChecks,
    DirectionChecks,
    PromptChecks,
    DescribedArgumentChecks,
    LawChecks,
    LearningChecks,
    InvarianceChecks,
    MetricChecks,
    TrainingChecks,
    GeneralChecks,
):
    """All checks, run from the last base to the first.
    An interface skips the checks of what it does not do."""


__all__ = ["InterfaceContract"]
