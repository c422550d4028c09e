"""Base class of every interface's settings. Does not need torch."""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.api.limits import check_arguments


@dataclass(kw_only=True)
class Settings:
    """Settings whose numbers and choices are checked on construction."""

    def __post_init__(self) -> None:
        check_arguments(self)
