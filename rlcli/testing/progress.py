"""What has become of a component's checks while they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from rlcli.testing.contract import Contract
from rlcli.testing.results import Check, CheckFailure, Examined, Outcome
from rlcli.testing.selection import contract_of, words_of
from rlcli.testing.subjects import Subject

CHECK_FAILURE = "check_failure"
"""The attribute of a failed check's report that has the fields of its CheckFailure."""


@dataclass
class Case:
    """One pytest item: a check with one set of parameters."""

    item: pytest.Item
    seconds: float = 0.0
    outcome: Outcome = "ok"
    failure: CheckFailure | None = None
    reason: str = ""
    note: str = ""
    has_ended: bool = False

    @property
    def contract(self) -> type[Contract] | None:
        return contract_of(self.item)

    @property
    def check(self) -> str:
        """The check that this is a case of."""
        return self.item.nodeid.partition("[")[0]

    @property
    def words(self) -> str:
        return words_of(self.item)

    @property
    def own_file(self) -> str:
        """The test file that it is from; empty for a case of a contract."""
        return "" if self.contract is not None else self.check.partition("::")[0]

    @property
    def parameters(self) -> str:
        callspec = getattr(self.item, "callspec", None)
        return callspec.id if callspec is not None else ""

    def take(self, report: pytest.TestReport) -> None:
        """Record the report of its setup, call or teardown."""
        self.seconds += report.duration
        self.note = next(
            (str(value) for name, value in report.user_properties if name == "note"), ""
        )
        if report.failed and self.failure is None:
            self.outcome = "FAIL"
            self.failure = CheckFailure(**vars(report)[CHECK_FAILURE])
        elif report.skipped and self.outcome == "ok":
            self.outcome = "skip"
            self.reason = getattr(report, "wasxfail", "") or _reason(report)


@dataclass
class SubjectProgress:
    """A component while its checks run."""

    subject: Subject
    cases: dict[str, Case] = field(default_factory=dict)
    """By pytest's name for the item."""
    checks: list[Check] = field(default_factory=list)
    """Those that have ended."""
    seconds: float = 0.0
    _expected: dict[str, list[Case]] = field(default_factory=dict)
    """Check that is not among `checks` yet → its cases; in the order of collection."""

    def expect(self, item: pytest.Item) -> None:
        """An item is going to run."""
        case = self.cases[item.nodeid] = Case(item)
        self._expected.setdefault(case.check, []).append(case)

    def count_checks(self) -> int:
        return len(self._expected) + len(self.checks)

    def ended(self) -> Iterator[Check]:
        """The next checks, as far as all of their cases have ended."""
        while self._expected:
            check, cases = next(iter(self._expected.items()))
            if not all(case.has_ended for case in cases):
                return
            yield self._end(check, cases)

    def rest(self) -> Iterator[Check]:
        """All other checks of which some case has ended: no further cases will run."""
        for check, cases in list(self._expected.items()):
            if ended := [case for case in cases if case.has_ended]:
                yield self._end(check, ended)

    def _end(self, check: str, cases: Sequence[Case]) -> Check:
        del self._expected[check]
        combined = _combined(cases, self._variant(cases[0]))
        self.checks.append(combined)
        return combined

    def _variant(self, case: Case) -> str:
        """`beta=0.1`: the arguments of its contract, if there are any, or other contracts that have
        some."""
        contracts = {tried.contract for tried in self.cases.values()} - {None}
        if case.contract is None or not isinstance(case.contract.args, Mapping):  # but a fixture
            return ""
        settings = [f"{name}={value}" for name, value in case.contract.args.items()]
        return ", ".join(settings) or ("no arguments" if len(contracts) > 1 else "")

    def tested(self) -> Examined:
        return Examined(self.subject, tuple(self.checks), self.seconds)


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


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
        words=cases[0].words,
        outcome=outcome,
        test=cases[0].check,
        seconds=seconds,
        failure=next(iter(failures), None),
        failed_cases=tuple(failed_parameters),
        cases=len(cases),
        reason=cases[0].reason if outcome == "skip" else "",
        note=next(iter(notes), ""),
        variant=variant,
        own_file=cases[0].own_file,
    )
