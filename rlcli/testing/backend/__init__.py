"""The contract of a backend: whatever it does to a model, the numbers match a plain loop over
transformers' own.

    class TestContract(BackendContract):
        name = "my-backend"

A backend that does not train, or does not generate, skips those checks.
"""

from rlcli.testing.backend.arguments import BackendArgumentChecks
from rlcli.testing.backend.declaration import DeclarationChecks
from rlcli.testing.backend.forward import ForwardChecks
from rlcli.testing.backend.generation import BackendGenerationChecks
from rlcli.testing.backend.optimizer import OptimizerChecks
from rlcli.testing.backend.ranks import RanksChecks
from rlcli.testing.backend.router_losses import RouterLossChecks
from rlcli.testing.backend.routing_replay import RoutingReplayChecks
from rlcli.testing.backend.sampling import SamplingChecks
from rlcli.testing.backend.state import StateChecks
from rlcli.testing.backend.streams import StreamChecks
from rlcli.testing.backend.training import BackendTrainingChecks

__all__ = ["BackendContract"]


class BackendContract(  # pytest runs the checks of the last base first
    RanksChecks,
    StateChecks,
    StreamChecks,
    BackendGenerationChecks,
    SamplingChecks,
    OptimizerChecks,
    BackendArgumentChecks,
    RouterLossChecks,
    RoutingReplayChecks,
    BackendTrainingChecks,
    ForwardChecks,
    DeclarationChecks,
):
    """All checks of a backend; subclasses set its `name`, and the `families` that it runs."""
