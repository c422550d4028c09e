"""Training of models with experts, next to a plain loop: on one rank, and on two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.model import TrainEngine
from rlcli.testing.backend.base import SETTINGS, BackendChecks, source_of
from rlcli.testing.backend.differences import require_small, weights_apart
from rlcli.testing.backend.layouts import (
    OF_TWO,
    WITH_VIRTUAL_STAGES,
    Layout,
    layout_name,
    ranks_in,
)
from rlcli.testing.backend.lifecycle import share_of
from rlcli.testing.backend.objectives import OBJECTIVES, train
from rlcli.testing.backend.plain import PlainTraining, Stats
from rlcli.testing.backend.samples import batch
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks, skip_without_forks

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
SHARES = (4, 7, 5)
"""Sequences of the first of two data-parallel ranks at each step; at the second, the other has
none."""
DEEP = "deep_mixtral"
"""Has a layer for every virtual stage."""
LEAST = 0.1
"""Errors of smaller numbers are relative to this."""

Deviations = dict[str, float]
"""The largest relative error of each number, compared with a plain loop."""
PlainStep = Callable[[SequenceSample, float], Mapping[str, float]]
"""(batch, relative learning rate) → what a plain loop reports of a step."""


@dataclass(frozen=True)
class MixtureLife:
    """A few training steps of a model with experts, alone or as one of two ranks."""

    checks: BackendChecks
    family: str
    head: str = "lm"
    settings: Mapping[str, Any] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0

    def sample(self, step: int) -> SequenceSample:
        """What all ranks together are trained on."""
        return batch(step)

    def plain_step(self, plain: PlainTraining) -> PlainStep:
        objective = OBJECTIVES[self.head]
        return lambda sample, rate: plain.step([sample], objective.plain, rate)

    def reported(self, stats: Mapping[str, float]) -> Mapping[str, float]:
        """What corresponds to the numbers of a plain step."""
        return stats

    def before_training(self, engine: TrainEngine) -> Deviations:
        return {}

    def on_rank(self, rank: int) -> Deviations:
        """The deviations, in a process of its own."""
        with self.checks.at_device():
            return replace(self, rank=rank).deviations()

    def deviations(self) -> Deviations:
        engine = self._engine()
        plain = self.checks.plain_training(self.family, self.head)
        plain_step = self.plain_step(plain)
        worst = self.before_training(engine)
        for step, rate in zip(range(len(SHARES)), self.checks.rates(), strict=False):
            sample = self.sample(step)
            actual = self.reported(self._train(engine, sample, step))
            for name, expected in plain_step(sample, rate).items():
                error = _relative_error(actual.get(name, math.inf), expected)
                worst[name] = max(worst.get(name, 0.0), error)
        weights = self.checks.weights(engine)
        return worst | {"weights": weights_apart(weights, plain.weights())}

    def _engine(self) -> TrainEngine:
        mesh = mesh_of_ranks(**self.degrees)
        settings = SETTINGS | dict(self.settings)
        settings |= {"head": self.head, "mesh": mesh, "expert_ranks": self.degrees.get("ep", 1)}
        return self.checks.trained_engine(self.family, **settings)

    def _train(self, engine: TrainEngine, sample: SequenceSample, step: int) -> Stats:
        """The stats of a step on this rank's share."""
        sample = share_of(sample, SHARES[step], self.rank, self.degrees.get("dp", 1))
        return train(
            engine, step, sample, OBJECTIVES[self.head], mb_spec=MicroBatchSpec(n_mbs=3 - step)
        )


class MixtureChecks(BackendChecks):
    """Compares such lives with plain loops."""

    cause: str
    """Why they usually differ."""

    @property
    def mixtures(self) -> Sequence[str]:
        """Models of `rlcli.testing.tiny_models` with experts that the backend runs."""
        families = self.cls.FAMILIES or FAMILIES
        return [family for family in FAMILIES if family in families]

    def on_two_ranks(
        self, life: type[MixtureLife], settings: Mapping[str, Any]
    ) -> dict[str, list[Deviations]]:
        """The deviations of each rank, by layout."""
        skip_without_forks()
        tried: dict[str, Sequence[Layout]] = {self.mixtures[0]: OF_TWO}
        if self.all_layouts and hasattr(self.backend(), "virtual_stages"):
            tried[DEEP] = [layout for layout in WITH_VIRTUAL_STAGES if ranks_in(layout[0]) == 2]
        deviations: dict[str, list[Deviations]] = {}
        for family, layouts in tried.items():
            for degrees, of_layout in self.tried(layouts, family):
                rank = life(self, family, settings={**settings, **of_layout}, degrees=degrees)
                deviations[layout_name(degrees, of_layout)] = run_on_ranks(2, rank.on_rank)
        return deviations

    def require_plain_ranks(self, deviations: Mapping[str, list[Deviations]]) -> None:
        for layout, ranks in deviations.items():
            for rank, of_rank in enumerate(ranks):
                self.require_plain(of_rank, f"rank {rank} of {layout}")

    def require_plain(self, deviations: Deviations, who: str) -> None:
        """Raises Violation if a number differs from that of a plain loop."""
        where = source_of(self.trained_engine(), "loss_of", "forward_micro_batch")
        for quantity, apart in deviations.items():
            require_small(f"{quantity} of {who}", apart, self.tolerance, "", self.cause, where)


def _relative_error(actual: float, expected: float) -> float:
    if not math.isfinite(actual):
        return math.inf
    return abs(actual - expected) / max(abs(expected), LEAST)
