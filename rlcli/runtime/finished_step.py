"""A training step that is done: what it adds to the metrics and to the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcli.api.dataflow import ModelInterfaceType
from rlcli.runtime.answered import Answered, named_reports
from rlcli.runtime.rollouts import Ahead
from rlcli.runtime.sample_flow import Step


@dataclass(frozen=True)
class FinishedStep:
    """The samples of a step, and what its calls reported."""

    samples: Step
    own_calls: Sequence[Answered]
    ahead: Ahead | None
    """What was generated ahead of it; None if it generates its own samples."""

    @property
    def ids(self) -> list[str]:
        """The samples it was for."""
        return self.samples.batch or []

    def numbers(self) -> dict[str, float]:
        """What the calls reported, and how long each took."""
        calls = [*(self.ahead.reports if self.ahead is not None else ()), *self.own_calls]
        numbers = named_reports(calls, Answered.reports, lambda mfc: mfc.model_name)
        numbers |= self.ahead.numbers if self.ahead is not None else {}
        return numbers | {f"time/{name}": took for one in calls for name, took in one.times().items()}

    def ledger(self, state: str) -> Iterator[Mapping[str, Any]]:
        """A line for each finished sample; `state`: of those that were not dropped."""
        if self.ahead is not None:
            yield from self.ahead.dropped
        yield from self.samples.ledger(state, self._versions())

    def _versions(self) -> Mapping[str, Mapping[str, int]]:
        """Sample → generating call → version of the weights that it sampled with."""
        if self.ahead is not None:
            return self.ahead.versions
        generating = [one for one in self.own_calls if one.mfc.interface_type is ModelInterfaceType.GENERATE]
        versions = {one.mfc.name: one.version for one in generating if one.updates}
        return dict.fromkeys(self.ids, versions)
