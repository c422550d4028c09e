"""No engine, and no time on a rank: rewards in separate processes,
which overlap with all other calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.limits import Limits
from rlcli.api.model import Model, ModelBackend, register_backend


@register_backend("cpu_pool")
@dataclass(frozen=True, kw_only=True)
class CPUPool(ModelBackend):
    """Runs the calls of a role without weights in CPU processes, one next to each rank of the role.

    Ranks compute other calls meanwhile: they generate the next samples, score these with other
    roles, or train. A process that dies, or is killed because it exceeds a limit, is replaced, and
    its call is repeated once.
    """

    TRAINS: ClassVar[bool] = False
    GENERATES: ClassVar[bool] = False
    POOLED: ClassVar[bool] = True
    RUNS_MODEL: ClassVar[bool] = False
    LIMITS: ClassVar[Limits] = {"cpu_s": {"gt": 0}, "memory_gib": {"gt": 0}}
    ON_RESUME: ClassVar[dict[str, str]] = {"cpu_s": "safe", "memory_gib": "safe"}

    cpu_s: float = 3600.0
    """Seconds of processor time that a call may take in its process. Processes that an interface
    starts itself, such as the workers of `math_reward`, have their own limits."""

    memory_gib: float = 32.0
    """Address space of a process."""

    def _initialize(self, model: Model) -> Model:
        model.module = None
        return model
