"""Repeats texts, but normalised and without control characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlcli.api.environment import Environment, Observation, register_environment


@dataclass(kw_only=True)
class Normalising(Environment):
    """Ends with a short text."""

    REPRODUCIBLE: ClassVar[bool] = True
    NO_EFFECT_ON_NUMBERS: ClassVar[tuple[str, ...]] = ("patience",)

    patience: float = 3.0
    """Seconds to wait for nothing."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        return f"{row['prompt']} Answer briefly."

    def step(self, action: str) -> Observation:
        kinds = {letter: unicodedata.category(letter) for letter in action}
        visible = "".join(letter for letter in action if not kinds[letter].startswith("C"))
        text = unicodedata.normalize("NFKC", visible)
        return Observation(text[:500], reward=1 / (1 + len(text)), done=len(text) < 3)


register_environment("normalising", Normalising)
