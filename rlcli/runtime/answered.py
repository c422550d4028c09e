"""What the ranks of a call answered, and the names under which it is reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar

from rlcli.api.dataflow import MFCDef
from rlcli.runtime.measures import Moments
from rlcli.runtime.partition import owners
from rlcli.runtime.scheduler import Task
from rlcli.topology import RolePlacement

T = TypeVar("T")


@dataclass(frozen=True)
class Answered:
    """A call that all its ranks have answered."""

    task: Task
    mfc: MFCDef
    placement: RolePlacement
    answers: Mapping[int, Mapping[str, Any]]
    copy_seconds: float = 0.0
    """Seconds until the last rank of the role that follows its role had the new weights; 0 if none follows."""
    updates: int = 0
    """Updates of its role's weights per training step; 0 if they never change."""

    def and_then(self, later: Answered) -> Answered:
        """Merge with the same call on other samples of the step."""
        answers = {rank: _added(answer, later.answers[rank]) for rank, answer in self.answers.items()}
        return replace(later, answers=answers, copy_seconds=self.copy_seconds + later.copy_seconds)

    def dropped(self) -> dict[str, str]:
        """Sample → why the call drops it."""
        return {id_: why for rank in owners(self.placement) for id_, why in self.answers[rank]["dropped"].items()}

    def stats(self) -> dict[str, float]:
        """Statistics reported by the interface, which has already reduced them over the ranks."""
        return dict(self.answers[self.placement.ranks[0]]["stats"])

    def averages(self) -> dict[str, Moments]:
        """Scores over all ranks' outputs, and counts of errors and the like if there were any."""
        counts, scores = (self._sum_over_ranks(what) for what in ("counts", "scores"))
        return {name: one for name, one in counts.items() if one.total} | scores

    def _sum_over_ranks(self, what: str) -> dict[str, Moments]:
        totals = _sums(self.answers[rank][what] for rank in owners(self.placement))
        return {name: moments for name, moments in totals.items() if moments.count}

    def reports(self) -> dict[str, float]:
        """Everything to record about the call."""
        return {name: moments.mean for name, moments in self.averages().items()} | self.stats()

    @property
    def version(self) -> int:
        """Version of the role's weights when the call began: the number of training steps behind them."""
        return int(self.answers[self.placement.ranks[0]]["version"]) // max(self.updates, 1)

    def times(self) -> dict[str, float]:
        """Seconds of the slowest rank, by name; also of copying its weights."""
        times = {self.mfc.name: max(self.answers[rank]["seconds"] for rank in self.placement.ranks)}
        return times | {f"{self.mfc.name}.copy_to": self.copy_seconds} if self.copy_seconds else times


def _added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's answers for two draws of a step, merged."""
    sums = {
        what: {name: astuple(moments) for name, moments in _sums((one[what], other[what])).items()}
        for what in ("counts", "scores")
    }
    return {**other, **sums, "seconds": one["seconds"] + other["seconds"]}


def _sums(reports: Iterable[Mapping[str, Sequence[Any]]]) -> dict[str, Moments]:
    """The moments of each name, as ranks send them, added up."""
    totals: dict[str, Moments] = {}
    for report in reports:
        for name, moments in report.items():
            totals[name] = totals.get(name, Moments()) + Moments(*moments)
    return totals


def named_reports(
    calls: Sequence[Answered], reports: Callable[[Answered], Mapping[str, T]], section: Callable[[MFCDef], str]
) -> dict[str, T]:
    """Reports of calls as `<section>/<name>`, or as `<call>/<name>` where several calls of a section report the same
    name: `math_inf/reward`."""
    found = [(one.mfc, name, value) for one in calls for name, value in reports(one).items()]
    uses = Counter((section(mfc), name) for mfc, name, _ in found)

    def full(mfc: MFCDef, name: str) -> str:
        prefix = section(mfc) if uses[section(mfc), name] == 1 else mfc.name
        return f"{prefix}/{name}" if prefix else name

    return {full(mfc, name): value for mfc, name, value in found}
