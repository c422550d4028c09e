"""No engine: for roles whose interface supplies what it needs, such as a rule-based reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.model import Model, ModelBackend, register_backend


@register_backend("null")
@dataclass(frozen=True, kw_only=True)
class Null(ModelBackend):
    """Leaves the role without weights; `model.module` stays None."""

    RUNS_MODEL: ClassVar[bool] = False

    def _initialize(self, model: Model) -> Model:
        model.module = None
        return model
