"""Every argument of a backend matters (`rlcli.testing.effects`), or it may be changed on resume,
since it changes no number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from rlcli.api.limits import needs_of
from rlcli.api.model import TrainEngine
from rlcli.errors import RlcliError
from rlcli.registry import signature
from rlcli.testing.arguments import (
    Changes,
    VariedArgument,
    arguments_of,
    silent_arguments,
)
from rlcli.testing.backend.base import SETTINGS, BackendChecks
from rlcli.testing.backend.differences import Weights, distance, weights_apart
from rlcli.testing.backend.forward import scores
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.mixtures import FAMILIES
from rlcli.testing.backend.objectives import train
from rlcli.testing.backend.plain import Stats
from rlcli.testing.backend.samples import batch, groups
from rlcli.testing.contract import skip_unless
from rlcli.testing.effects import Effects, demand_effects, remembered

SHORT: dict[str, Any] = {"greedy": True, "max_new_tokens": 4}
DEFAULTS = {**SETTINGS, "dtype": "float32"}
STEPS = {1: batch(lengths=((4, 7), (3, 5))), 5: groups()}
"""Number of a step, of ten → its batch: with these settings the learning rate rises at the first,
and falls at the second."""


class BackendArgumentChecks(BackendChecks):
    def test_every_argument_matters(self) -> None:
        """every argument changes a number, unless it is declared to change none"""
        cls = self.cls
        skip_unless(cls.REPRODUCIBLE, "does not promise equal responses (REPRODUCIBLE)")
        self.require_all_layouts()
        silent = (*silent_arguments(cls), *self._safe_on_resume())
        arguments = [_without_auto(one) for one in arguments_of(self.backend(**DEFAULTS))]
        # another argument may depend on a choice
        arguments.sort(key=lambda argument: (not argument.is_choice, argument.name in silent))
        defaults = {argument.name: argument.default for argument in arguments}
        report = remembered(self.report, defaults)

        def accepts(changes: Changes) -> bool:
            return self._accepts(changes) and (
                changes.keys().isdisjoint(silent) or isinstance(report(changes), EngineReport)
            )

        needs = needs_of(cls)
        demand_effects(Effects(arguments, needs, accepts, report, self._differ), cls, silent)

    def _safe_on_resume(self) -> list[str]:
        resumed = signature("backends", self.name).constants.get("ON_RESUME", {})
        return [name for name, effect in resumed.items() if effect == "safe"]

    def _accepts(self, changes: Changes) -> bool:
        try:
            self.backend(**{**DEFAULTS, **changes})
        except RlcliError:
            return False
        return True

    def report(self, changes: Changes) -> EngineReport | str:
        """What an engine with these settings does, or why it is refused."""
        supported = self.cls.FAMILIES or FAMILIES
        family = FAMILIES[0] if FAMILIES[0] in supported else self.families[0]
        try:
            engine = self.engine(family, **{**DEFAULTS, **changes})
            stats = _train(engine) if self.cls.TRAINS else {}
            scored = scores(engine, groups()) if self.cls.SCORES else torch.zeros(0)
            drawn = generate(engine, **SHORT).tokens if self.cls.GENERATES else []
        except (RlcliError, pytest.skip.Exception) as error:
            return str(error)
        return EngineReport(
            stats, self.weights(engine), scored, [tokens.tolist() for tokens in drawn]
        )

    def _differ(self, first: EngineReport | str, second: EngineReport | str) -> bool:
        if isinstance(first, str) or isinstance(second, str):
            return first != second
        return first.answers != second.answers or not (
            first.stats == pytest.approx(second.stats, rel=self.tolerance, abs=1e-9)
            and weights_apart(first.weights, second.weights) <= self.tolerance
            and distance(first.scores, second.scores) <= self.tolerance
        )


@dataclass(frozen=True)
class EngineReport:
    """What an engine does in two steps, and then."""

    stats: Mapping[str, float]
    weights: Weights
    scores: torch.Tensor
    answers: list[list[int]]


def _train(engine: TrainEngine) -> Stats:
    """The stats of two steps."""
    stats: Stats = {}
    for step, sample in STEPS.items():
        reported = train(engine, step, sample)
        stats |= {f"{name} {step}": value for name, value in reported.items()}
    return stats


def _without_auto(argument: VariedArgument) -> VariedArgument:
    """`auto` is one of the others."""
    return replace(argument, others=tuple(v for v in argument.others if v != "auto"))
