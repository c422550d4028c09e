"""Runs of ranks, one for each layout that the backend declares, and what they reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file

from rlcli.testing.backend.base import BackendChecks, source_of
from rlcli.testing.backend.differences import Weights, require_small
from rlcli.testing.backend.layouts import ALONE, LAYOUTS, Layout, layout_name, ranks_in
from rlcli.testing.backend.lifecycle import OF_ONE, ON_ONE, Life, RankReport, weights_file
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.ranks import Frame, RankDeath, RankTimeout, run_on_ranks, skip_without_forks


@dataclass(frozen=True)
class Lives:
    """What the ranks of each layout reported, or why they failed."""

    folder: Path
    reports: Mapping[str, list[RankReport]]
    """By layout and rank."""
    error: Exception | None = None

    @property
    def alone(self) -> RankReport:
        """The report of the single rank."""
        return self.reports[ALONE][0]

    def by_rank(self) -> dict[str, RankReport]:
        return {
            rank_name(layout, rank): report
            for layout, ranks in self.reports.items()
            for rank, report in enumerate(ranks)
        }

    def weights(self, layout: str, head: str, rank: int = 0) -> Weights:
        return load_file(self.folder / layout / weights_file(head, rank))


class RunsOfRanks(BackendChecks):
    """Everything ranks do, in one run for all checks of them; the checks are in subclasses."""

    rank_seconds: ClassVar[float] = 200
    """Time limit for all work of a layout's ranks: at least ten times what they need on an
    otherwise idle machine."""
    layouts: ClassVar[Sequence[Layout]] = LAYOUTS

    @pytest.fixture(scope="class")
    @classmethod
    def lives(cls, tmp_path_factory: pytest.TempPathFactory) -> Lives:
        return cls().live(tmp_path_factory.mktemp("ranks"))

    @pytest.fixture
    def finished(self, lives: Lives) -> Lives:
        """Skips the check if the ranks failed."""
        skip_if(lives.error, "not tried: the ranks did not finish")
        return lives

    def live(self, folder: Path) -> Lives:
        """First a single rank, then the ranks of each layout."""
        skip_without_forks()
        with self.at_device():
            self.scoring_engine()  # skips if there is none
        reports: dict[str, list[RankReport]] = {}
        before: Life | None = None
        try:
            alone = Life(self, {}, folder)
            reports[ALONE] = [alone.on_rank(0)]
            for degrees, settings in self.tried(self.layouts, self.family_of_ranks):
                first = Life(self, degrees, folder, settings, before)
                ranks = run_on_ranks(ranks_in(degrees), first.on_rank, self.rank_seconds)
                if OF_ONE in ranks[0]:
                    with self.at_device():
                        alone.resume(first, ON_ONE, ranks[0])
                reports[layout_name(degrees, settings)] = ranks
                before = first
        except Exception as error:
            return Lives(folder, {}, error)
        return Lives(folder, reports)

    def test_ranks_get_through(self, lives: Lives) -> None:
        """all ranks finish; none waits forever for another"""
        if isinstance(lives.error, RankTimeout):
            stood = (f"rank {rank} in {_where(at)}" for rank, at in lives.error.stacks.items())
            finding = f"ranks did not finish within {self.rank_seconds:g} s: {', '.join(stood)}"
        elif isinstance(lives.error, RankDeath):
            finding = lives.error.problem
        elif lives.error is not None:
            raise lives.error
        else:
            return
        raise Violation(
            finding,
            "every rank takes part in every collective; idle micro-batches run through "
            "the model as others do",
            self.source("forward_micro_batch", "forward_backward_batch", "forward_batch"),
        )

    # -- parts of checks ---------------------------------------------------------------------------

    def require_training(self) -> None:
        skip_unless(self.cls.TRAINS, "does not train")

    def require_small_errors(
        self,
        lives: Lives,
        name: str,
        quantity: str,
        cause: str,
        *methods: str,
        limit: float | None = None,
    ) -> None:
        """Check that no rank reported, under this name, an error above the limit, by default the
        tolerance. `methods`: where to look."""
        tolerance = self.tolerance if limit is None else limit
        where = self.source(*methods)
        for who, report in lives.by_rank().items():
            require_small(quantity, report.get(name, 0.0), tolerance, f"on {who}", cause, where)

    def source(self, *methods: str) -> str:
        """Where the first of these methods of an engine is."""
        return source_of(self._any_engine, *methods)

    @cached_property
    def _any_engine(self) -> Any:
        return self.engine()


def rank_name(layout: str, rank: int) -> str:
    return layout if layout == ALONE else f"rank {rank} of {layout}"


def _where(frames: list[Frame]) -> str:
    """The innermost frame outside libraries."""
    for file, line, function in frames:
        if "site-packages" not in file:
            return f"{function} ({Path(file).name}:{line})"
    return "an unknown location"
