"""The contract of environments.

    class TestContract(EnvironmentContract):
        name = "my-environment"

is a complete test: it plays the episodes that EXAMPLES of its class shows, or `examples`, and calls
its tools with arguments drawn from their schemas. There is no model, and torch is not imported.
"""

from __future__ import annotations

from rlcli.api.environment import Environment
from rlcli.testing.declaration import DeclaredSubject
from rlcli.testing.environment_checks.conduct import ConductChecks
from rlcli.testing.environment_checks.episodes import EpisodeChecks
from rlcli.testing.environment_checks.examples import ExampleChecks
from rlcli.testing.environment_checks.playable import PlayableChecks
from rlcli.testing.environment_checks.tools import ToolChecks

__all__ = ["EnvironmentContract"]


class EnvironmentContract(
    ExampleChecks,
    ConductChecks,
    ToolChecks,
    EpisodeChecks,
    PlayableChecks,
    DeclaredSubject,
):
    """What every environment must do."""

    kind = "environment"
    base = Environment
