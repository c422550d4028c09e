"""What the settings of every interface begin with. Torch is not needed for it."""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.api.limits import check_arguments


@dataclass(kw_only=True)
class Settings:
    """Its numbers and choices are checked when it is made."""

    def __post_init__(self) -> None:
        check_arguments(self)
