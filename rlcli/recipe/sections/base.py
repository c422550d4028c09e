"""Base class of all sections of a recipe."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MOST = 10**9
"""No run has more steps, tokens in a micro-batch or seconds (thirty years):
whoever writes more has made a mistake."""

Positive = Annotated[int, Field(ge=1, le=MOST)]
NotNegative = Annotated[int, Field(ge=0, le=MOST)]
Seconds = Annotated[float, Field(gt=0, le=MOST)]

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class Section(BaseModel):
    """Base of all sections. Unknown keys are refused, types are strict."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    documented_in: ClassVar[type | None] = None
    """The class with the fields' docstrings, if it is another one;
    `rlcli.recipe.introspection.docs` reads them."""
