"""Base class of all sections of a recipe."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of all sections. Unknown keys are refused, types are strict."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    documented_in: ClassVar[type | None] = None
    """The class with the fields' docstrings, if it is another one; `rlcli.recipe.introspection.docs` reads them."""
