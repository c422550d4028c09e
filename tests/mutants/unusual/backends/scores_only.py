"""Forward passes only: a model that neither trains nor generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.model import Model, ModelBackend, register_backend

from ._engine import TransformersEngine
from ._settings import TransformersSettings


@register_backend("scores_only")
@dataclass(frozen=True, kw_only=True)
class ScoresOnly(TransformersSettings, ModelBackend):
    """A copy of the model on every rank."""

    TRAINS: ClassVar[bool] = False
    GENERATES: ClassVar[bool] = False
    DIMENSIONS: ClassVar[tuple[str, ...]] = ("dp",)
    MEMORY: ClassVar[str] = "_memory.InferenceMemory"

    def _initialize(self, model: Model) -> Model:
        model.module = TransformersEngine(model, self)
        model.module.lm.requires_grad_(False)
        return model
