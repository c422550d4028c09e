"""The profile of a step for people: its critical path as a table, what its ranks wait for, and what
would make it shorter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlcli.observe.critical_path import (
    BETWEEN,
    COPY,
    RankWaits,
    StepTrace,
    critical_path,
    waits_of,
)
from rlcli.observe.series import short

AHEAD = "samples made ahead"
"""How what a call works on begins (`Batch.title`) if it runs ahead of the steps."""
SMALL = 0.01
"""Share of a step below which a call is added to what passes between calls."""
LARGE = 0.1
"""Share of a step from which something is worth a sentence."""
UNEVEN = 1.25
"""How much longer the slowest rank of a call takes than the fastest for that to be worth one."""


@dataclass(frozen=True)
class PathRow:
    """A call on the critical path."""

    call: str
    kind: str
    rank: int | None
    seconds: float
    """How much of the step's duration it accounts for."""
    share: float


@dataclass(frozen=True)
class StepProfile:
    """What is said of a step."""

    step: int
    seconds: float
    path: list[PathRow]
    waits: list[RankWaits]
    advice: list[str]


def profile_of_step(step: StepTrace) -> StepProfile:
    """The profile of a step of a trace."""
    path, waits = _rows(step), waits_of(step)
    advice = list(_advice(step, path, waits))
    return StepProfile(step.number, step.seconds, path, waits, advice)


def _rows(step: StepTrace) -> list[PathRow]:
    """The path, with the stretches of a call on a rank added up, in the order of the first; what is
    small is at the end, as between calls."""
    stretches = critical_path(step)
    sums: dict[tuple[str, str, int | None], float] = {}
    for stretch in stretches:
        key = stretch.name, stretch.kind, stretch.rank
        sums[key] = sums.get(key, 0.0) + stretch.seconds
    between = sums.pop((BETWEEN, BETWEEN, None), 0.0)
    large = {key: seconds for key, seconds in sums.items() if seconds >= SMALL * step.seconds}
    between += sum(sums.values()) - sum(large.values())
    rows = [_row(step, *key, seconds) for key, seconds in large.items()]
    return [*rows, _row(step, BETWEEN, BETWEEN, None, between)]


def _row(step: StepTrace, call: str, kind: str, rank: int | None, seconds: float) -> PathRow:
    return PathRow(call, kind, rank, seconds, seconds / step.seconds)


# -- what would make it shorter --------------------------------------------------------------------


def _advice(step: StepTrace, path: Sequence[PathRow], waits: Sequence[RankWaits]) -> Iterator[str]:
    """One sentence or more."""
    calls = [row for row in path if row.kind != BETWEEN]
    if not calls:
        yield "No call ended in this step: what it waited for is outside of it."
        return
    longest = max(calls, key=lambda row: row.seconds)
    yield from _on_the_longest(step, longest, waits)
    yield from _on_uneven_ranks(step, longest)
    for row in calls:
        if row.kind == "copy" and row.share >= LARGE:
            call = row.call.removesuffix(COPY)
            yield (
                f"The new weights of {call} take {_seconds(row, step)}: `transfer: delta` in its "
                "hooks sends only what has changed."
            )
    if (between := path[-1]).share >= LARGE:
        yield (
            f"{_seconds(between, step)} pass between calls, with transfers, records and messages: "
            "a larger train.prompts_per_step makes them matter less."
        )


def _on_the_longest(step: StepTrace, longest: PathRow, waits: Sequence[RankWaits]) -> Iterator[str]:
    most = max(waits, key=lambda of: _waits_for(of, longest.call))
    seconds = _waits_for(most, longest.call)
    text = f"{longest.call} takes {_seconds(longest, step)}"
    if seconds >= LARGE * step.seconds:
        verb = "waits" if len(most.ranks) == 1 else "wait"
        text += f", and {ranks_text(most.ranks)} {verb} {short(seconds)} s for it"
    yield f"{text}. Whatever makes it faster makes the step shorter."
    if longest.kind == "generate":
        yield from _on_generation(step)


def _on_generation(step: StepTrace) -> Iterator[str]:
    """How generation could overlap with training."""
    of_kind = {
        kind: [each for each in step.calls if each.span.kind == kind]
        for kind in ("generate", "train_step")
    }
    trained = sorted({each.span.name for each in of_kind["train_step"]})
    if not trained:
        return
    if any(each.of.startswith(AHEAD) for each in of_kind["generate"]):
        yield (
            f"It already runs ahead of {trained[0]}, which waits for it all the same: it needs "
            "more devices, or shorter responses."
        )
        return
    generating, training = ({each.process for each in calls} for calls in of_kind.values())
    is_apart = generating.isdisjoint(training)
    ranks = "" if is_apart else "ranks of its own (rollout.devices of its role) and "
    yield (
        f"With {ranks}train.max_staleness=1, it would run while {trained[0]} works on the step "
        "before."
    )


def _on_uneven_ranks(step: StepTrace, longest: PathRow) -> Iterator[str]:
    seconds: dict[int, float] = {}
    for each in step.calls:
        if each.span.name == longest.call:
            seconds[each.process] = seconds.get(each.process, 0.0) + step.inside(each.span)
    fastest, slowest = min(seconds.values()), max(seconds.values())
    if slowest > UNEVEN * fastest and slowest - fastest >= LARGE * step.seconds:
        rank = max(seconds, key=lambda rank: seconds[rank])
        yield (
            f"Its ranks are uneven: {short(fastest)} to {short(slowest)} s, and rank {rank} is the "
            "slowest."
        )


def _waits_for(waits: RankWaits, call: str) -> float:
    name = call.removesuffix(COPY)
    return sum(seconds for of, seconds in waits.seconds.items() if of.split()[-1] == name)


def _seconds(row: PathRow, step: StepTrace) -> str:
    return seconds_text(row.seconds, step.seconds)


def seconds_text(seconds: float, of_step: float) -> str:
    """`1.62 s (37%)`."""
    return f"{short(seconds)} s ({seconds / of_step:.0%})"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0-3`, `ranks 0, 2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    is_range = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]}-{ranks[-1]}" if is_range else f"ranks {', '.join(map(str, ranks))}"
