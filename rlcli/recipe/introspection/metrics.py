"""The numbers that a run may write, with what they mean: those of every run and those that
interfaces declare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlcli import registry
from rlcli.api.metrics import RUN_METRICS
from rlcli.recipe.components import declared_mapping


@dataclass(frozen=True)
class Metric:
    """A number in the records of a run."""

    name: str
    """As in the records, with `<…>` for what varies; `<role>/…` is `eval/…` where an evaluation
    reports it."""
    unit: str
    meaning: str
    interfaces: tuple[str, ...] = ()
    """Which interfaces report it; none if it does not depend on them."""


def all_metrics() -> list[Metric]:
    """Those of runs, then those of interfaces; one that several interfaces declare alike is listed
    once."""
    reporting: dict[tuple[str, str, str], list[str]] = {}
    for interface in registry.names("interfaces"):
        for line in _declared_by(interface):
            reporting.setdefault(line, []).append(interface)
    of_runs = [Metric(name, unit, meaning) for name, (unit, meaning) in RUN_METRICS.items()]
    return of_runs + [Metric(*line, tuple(interfaces)) for line, interfaces in reporting.items()]


def _declared_by(interface: str) -> Iterator[tuple[str, str, str]]:
    """(name, unit, meaning) of each entry of METRICS; malformed ones are for `rlcli test interface`
    to report."""
    for name, entry in declared_mapping("interfaces", interface, "METRICS").items():
        if isinstance(entry, tuple | list) and len(entry) == 2:
            yield f"<role>/{name}", str(entry[0]), str(entry[1])
