"""What the settings of every interface begin with. Torch is not needed for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from rlcli.api.limits import check_limits


@dataclass(kw_only=True)
class Settings:
    """Its numbers are checked when it is made."""

    def __post_init__(self) -> None:
        check_limits(self)

    def _check_choice(self, name: str, allowed: Any) -> None:
        if getattr(self, name) not in get_args(allowed):
            choices = ", ".join(get_args(allowed))
            raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {choices}")
