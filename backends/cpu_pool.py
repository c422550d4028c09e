"""No engine, and no time of a rank either: rewards in processes of their own, which overlap with all other calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.limits import Limits
from rlcli.api.model import Model, ModelBackend, register_backend


@register_backend("cpu_pool")
@dataclass(frozen=True, kw_only=True)
class CPUPool(ModelBackend):
    """Has the calls of a role without weights done by processes on the processor, one next to each rank of the role.

    Ranks compute other calls meanwhile: they generate the next samples, score these by other roles, or train. A process
    that dies, or is killed because it exceeds a limit, is replaced, and what it worked on is done again, once.
    """

    TRAINS: ClassVar[bool] = False
    GENERATES: ClassVar[bool] = False
    POOLED: ClassVar[bool] = True
    RUNS_MODEL: ClassVar[bool] = False
    LIMITS: ClassVar[Limits] = {"cpu_s": {"gt": 0}, "memory_gib": {"gt": 0}}
    ON_RESUME: ClassVar[dict[str, str]] = {"cpu_s": "safe", "memory_gib": "safe"}

    cpu_s: float = 3600.0
    """Seconds of processor time that a call may take in its process. What an interface starts itself, such as the
    workers of `math_reward`, has limits of its own."""

    memory_gib: float = 32.0
    """Address space of a process."""

    def _initialize(self, model: Model) -> Model:
        model.module = None
        return model
