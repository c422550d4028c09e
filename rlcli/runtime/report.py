"""The answers of calls, and what they say of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rlcli.api.dataflow import MFCDef
from rlcli.api.output_checks import Segments
from rlcli.observe.profile import ProfiledCall
from rlcli.observe.responses import Moments
from rlcli.runtime.ranks import Answers
from rlcli.topology import RolePlacement

T = TypeVar("T")


@dataclass(frozen=True)
class Answered:
    """A call that all its ranks have answered."""

    mfc: MFCDef
    seconds: Mapping[int, float]
    """Rank → how long it took."""
    updates: int
    """Updates of its role's weights per training step; 0 if they never change."""
    version: int
    """Version of the role's weights when the call began:
    the number of training steps behind them."""
    stats: Mapping[str, float]
    """Statistics reported by the interface, which has already reduced them over the ranks."""
    scores: Mapping[str, Moments]
    """Scores over all ranks' outputs."""
    counts: Mapping[str, Moments]
    """Errors and the like."""
    dropped: Mapping[str, str]
    """Sample → why the call drops it."""
    segments: Mapping[str, Segments]
    """Sample → the segments of its responses, if the weights may change while they are sampled."""
    tokens: int = 0
    """Of the sequences that it scored or trained on, or of the responses that it generated."""
    operations: float = 0.0
    """Floating-point operations of all ranks; 0 if they are not known."""
    capacity: float = 0.0
    """The operations that their devices could have computed in that time; 0 if it is not known."""
    copy_seconds: float = 0.0
    """Seconds until the last rank of the role that follows its role had the new weights;
    0 if none follows."""
    copy_bytes: int = 0
    """Bytes that ranks sent each other for that."""

    @classmethod
    def of(
        cls, mfc: MFCDef, placement: RolePlacement, answers: Answers, updates: int = 0
    ) -> Answered:
        """`answers`: those of the call's ranks to `run_call`."""
        first, owned = answers[placement.ranks[0]], [answers[rank] for rank in placement.owners]
        seconds = {rank: answers[rank]["seconds"] for rank in placement.ranks}
        per_step = max(updates, 1)
        version = int(first["version"]) // per_step
        segments = {
            id_: in_steps(of_sample, per_step)
            for answer in owned
            for id_, of_sample in answer["segments"].items()
        }
        scores = _sums(answer["scores"] for answer in owned)
        counts = _sums(answer["counts"] for answer in owned)
        dropped = {id_: why for answer in owned for id_, why in answer["dropped"].items()}
        return cls(
            mfc=mfc,
            seconds=seconds,
            updates=updates,
            version=version,
            stats=first["stats"],
            scores=scores,
            counts=counts,
            dropped=dropped,
            segments=segments,
            tokens=_summed(owned, "tokens"),
            operations=_summed(answers.values(), "operations"),
            capacity=_capacity(answers.values()),
        )

    def and_then(self, later: Answered) -> Answered:
        """Merge with the same call on other samples of the step."""
        return replace(
            later,
            seconds={rank: seconds + later.seconds[rank] for rank, seconds in self.seconds.items()},
            scores=_sums((self.scores, later.scores)),
            counts=_sums((self.counts, later.counts)),
            tokens=self.tokens + later.tokens,
            operations=self.operations + later.operations,
            capacity=self.capacity + later.capacity,
            copy_seconds=self.copy_seconds + later.copy_seconds,
            copy_bytes=self.copy_bytes + later.copy_bytes,
        )

    @property
    def names(self) -> set[str]:
        """What the call has measured, whether or not it is reported."""
        return {*self.counts, *self.scores, *self.stats}

    def averages(self) -> dict[str, Moments]:
        """Scores, and counts of errors and the like if there were any."""
        counts = {name: moments for name, moments in self.counts.items() if moments.total}
        return counts | {name: moments for name, moments in self.scores.items() if moments.size}

    def reports(self) -> dict[str, float]:
        """Everything to record about the call, except its times."""
        return {name: moments.mean for name, moments in self.averages().items()} | dict(self.stats)

    @property
    def mfu(self) -> float | None:
        """The operations as a share of what the devices could have computed; None if either is not
        known."""
        if not self.operations or not self.capacity:
            return None
        return self.operations / self.capacity

    def costs(self) -> dict[str, float]:
        """By name of the metric: seconds of the slowest rank, and what it took to copy weights, if
        they were copied."""
        call = self.mfc.name
        copy = {f"time/{call}.copy_to": self.copy_seconds, f"bytes/{call}.copy_to": self.copy_bytes}
        return {f"time/{call}": max(self.seconds.values())} | {
            name: cost for name, cost in copy.items() if cost
        }


def _capacity(answers: Iterable[Mapping[str, Any]]) -> float:
    """The operations that devices could have computed in the time of their answers."""
    return sum(float(answer["rate"] * answer["seconds"]) for answer in answers)


def _summed(answers: Iterable[Mapping[str, Any]], name: str) -> Any:
    return sum(answer[name] for answer in answers)


def performance(calls: Iterable[Answered]) -> dict[str, float]:
    """`perf/<role>/…` of the roles that compute with tokens, over all calls of a step that do."""
    by_role: dict[str, list[Answered]] = {}
    for answered in calls:
        if answered.tokens:
            by_role.setdefault(answered.mfc.model_name, []).append(answered)
    numbers: dict[str, float] = {}
    for role, answers in by_role.items():
        seconds = sum(max(answered.seconds.values()) for answered in answers)
        tokens = sum(answered.tokens for answered in answers)
        operations = sum(answered.operations for answered in answers)
        capacity = sum(answered.capacity for answered in answers)
        numbers[f"perf/{role}/tokens_per_second"] = tokens / seconds
        if operations:
            numbers[f"perf/{role}/flops"] = operations
        if operations and capacity:
            numbers[f"perf/{role}/mfu"] = operations / capacity
    return numbers


def profile_of(step: int, calls: Iterable[Answered]) -> list[ProfiledCall]:
    """The rows of a step in the table of a profile."""
    return [
        ProfiledCall(
            step=step,
            call=answered.mfc.name,
            seconds=max(answered.seconds.values()),
            operations=answered.operations,
            mfu=answered.mfu,
        )
        for answered in calls
    ]


def in_steps(responses: Segments, updates: int) -> Segments:
    """The segments of a sample with versions counted in training steps of `updates` updates
    each."""
    return [
        [(version // updates, tokens) for version, tokens in response] for response in responses
    ]


def add_report(reports: dict[str, Answered], answered: Answered) -> None:
    """Add what a call answered to what it has answered on other samples of the step."""
    call = answered.mfc.name
    reports[call] = reports[call].and_then(answered) if call in reports else answered


def _sums(reports: Iterable[Mapping[str, Sequence[Any]]]) -> dict[str, Moments]:
    """The moments of each name, as ranks send them, added up."""
    totals: dict[str, Moments] = {}
    for report in reports:
        for name, moments in report.items():
            totals[name] = totals.get(name, Moments()) + Moments(*moments)
    return totals


def named_reports(
    calls: Sequence[Answered],
    reports: Callable[[Answered], Mapping[str, T]],
    section: Callable[[MFCDef], str],
) -> dict[str, T]:
    """Reports of calls as `<section>/<name>`, or as `<call>/<name>` where several calls of a
    section measure something of the same name: `math_inf/reward`."""
    named = [
        (answered.mfc, name, value)
        for answered in calls
        for name, value in reports(answered).items()
    ]
    # also what a call has measured and does not report now, so that a name is that of one call
    uses = Counter((section(answered.mfc), name) for answered in calls for name in answered.names)

    def full(mfc: MFCDef, name: str) -> str:
        prefix = section(mfc) if uses[section(mfc), name] == 1 else mfc.name
        return f"{prefix}/{name}" if prefix else name

    return {full(mfc, name): value for mfc, name, value in named}
