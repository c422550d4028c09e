"""Transfers that are under way. Their targets count as holders of the tensors from the moment they are planned, so that
nothing is sent twice; whoever needs the tensors waits until they have arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlcli.runtime.buffer import Transfer


@dataclass(eq=False)
class Arrival:
    """A plan of transfers that has been sent out."""

    samples: Mapping[int, set[str]]
    """Rank → the samples of which it is sent something."""
    then: list[Callable[[Arrival], None]] = field(default_factory=list)
    """Called once all of it has arrived."""


class Arrivals:
    """All plans that have been sent out and not yet been carried out."""

    def __init__(self) -> None:
        self._expected: list[Arrival] = []

    def expect(self, plan: Sequence[Transfer]) -> Arrival:
        """Note a plan that is being sent out."""
        samples: dict[int, set[str]] = {}
        for transfer in plan:
            samples.setdefault(transfer.target, set()).update(transfer.ids)
        arrival = Arrival(samples)
        self._expected.append(arrival)
        return arrival

    def of(self, shares: Mapping[int, Sequence[str]]) -> list[Arrival]:
        """The plans that send something of these samples to these ranks (rank → samples)."""
        return [
            arrival
            for arrival in self._expected
            if any(not arrival.samples.get(rank, set()).isdisjoint(ids) for rank, ids in shares.items())
        ]

    def end(self, arrival: Arrival) -> None:
        """Note that a plan has been carried out."""
        self._expected.remove(arrival)
        for then in arrival.then:
            then(arrival)
