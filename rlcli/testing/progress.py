"""What has become of a component's checks while they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from rlcli.testing.contract import Contract
from rlcli.testing.results import Check, CheckFailure, Examined, Outcome
from rlcli.testing.selection import contract_of, words_of
from rlcli.testing.subjects import Subject


@dataclass
class Case:
    """One pytest item: a check with one set of parameters."""

    item: pytest.Item
    seconds: float = 0.0
    outcome: Outcome = "ok"
    failure: CheckFailure | None = None
    reason: str = ""
    note: str = ""

    @property
    def contract(self) -> type[Contract] | None:
        return contract_of(self.item)

    @property
    def check(self) -> str:
        """The check that this is a case of."""
        return self.item.nodeid.partition("[")[0]

    @property
    def parameters(self) -> str:
        callspec = getattr(self.item, "callspec", None)
        return callspec.id if callspec is not None else ""


@dataclass
class SubjectProgress:
    """A component while its checks run."""

    subject: Subject
    cases: dict[str, Case] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    """Those that have ended."""
    seconds: float = 0.0

    def add(self, cases: Sequence[Case]) -> Check:
        """The check that these are all cases of, which has ended."""
        check = _combined(cases, self._variant(cases[0]))
        self.checks.append(check)
        return check

    def _variant(self, case: Case) -> str:
        """`beta=0.1`, for a component whose tests run the contract with several sets of
        arguments."""
        contracts = {tried.contract for tried in self.cases.values()} - {None}
        if case.contract is None or len(contracts) < 2:
            return ""
        settings = [f"{name}={value}" for name, value in case.contract.args.items()]
        return ", ".join(settings) or "no arguments"

    def tested(self) -> Examined:
        return Examined(self.subject, tuple(self.checks), self.seconds)


def _combined(cases: Sequence[Case], variant: str) -> Check:
    """The combined result of a check's cases."""
    failed = [case for case in cases if case.outcome == "FAIL"]
    outcome: Outcome = "ok"
    if failed:
        outcome = "FAIL"
    elif all(case.outcome == "skip" for case in cases):
        outcome = "skip"
    seconds = sum(case.seconds for case in cases)
    failures = [case.failure for case in failed]
    failed_parameters = [case.parameters for case in failed if case.parameters]
    notes = [case.note for case in cases if case.note]
    return Check(
        words=words_of(cases[0].item),
        outcome=outcome,
        test=cases[0].check,
        seconds=seconds,
        failure=next(iter(failures), None),
        failed_cases=tuple(failed_parameters),
        cases=len(cases),
        reason=cases[0].reason if outcome == "skip" else "",
        note=next(iter(notes), ""),
        variant=variant,
    )
