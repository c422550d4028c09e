"""Checks that the mock of a call looks like its result."""

from __future__ import annotations

import pytest

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import MEANINGS
from rlcli.testing.contract import Violation
from rlcli.testing.interface.inference_trial import (
    CallTrial,
)
from rlcli.testing.interface.outputs import (
    check_form,
    check_numbers,
    check_same,
)
from rlcli.testing.interface.training_trial import (
    overrides,
    place_of_call,
)


def check_mock(calls: CallTrial) -> None:
    """Raise Violation unless the mock of a call that keeps lengths has the keys,
    lengths and dtypes of the call.

    The default mock does not cover optional keys, metadata, or scores that are flags.
    """
    try:
        mock = calls.mock(calls.batch)
    except NotImplementedError:
        pytest.skip("has no mock")
    where = place_of_call(calls.interface, "mock")
    check_form(mock, calls.batch.ids, calls.interface.writes(calls.call), where)
    if overrides(calls.interface, "mock"):
        _check_fields(mock, calls.result, where)
    if calls.call == "inference":
        _check_lengths(mock, calls.result, where)
    check_numbers(mock, where)
    if calls.mock(calls.batch.select_indices([])).keys != mock.keys:
        raise Violation(
            "the mock of no samples has other keys", "a rank may hold no sample at all", where
        )
    cause = "draw from stable_seed of the sample's id, and from nothing else"
    check_same(mock, calls.mock(calls.batch), "between two mocks alike", cause, where, exact=True)
    alone = calls.mock(calls.batch.select_indices([1]))
    check_same(mock, alone, "when it is mocked alone", cause, where, exact=True)


def _check_fields(mock: SequenceSample, result: SequenceSample, where: str) -> None:
    """Raise Violation unless a mock has the keys, the metadata, and the dtypes and shapes of rows
    that the result of its call has."""
    for attribute in ("keys", "metadata", "dtypes", "trailing_shapes"):
        of_mock, of_call = getattr(mock, attribute), getattr(result, attribute)
        if attribute in ("keys", "metadata"):
            of_mock, of_call = sorted(of_mock), sorted(of_call)
        if of_mock != of_call:
            raise Violation(
                f"the {attribute} of the mock are {of_mock}, those of the call {of_call}",
                "return the same: a graph of mocks must fail where the real one does",
                where,
            )


def _check_lengths(mock: SequenceSample, result: SequenceSample, where: str) -> None:
    for key in mock.keys:
        has_own = key in MEANINGS and MEANINGS[key].has_own_sequences
        if not has_own and mock.seqlens[key] != result.seqlens[key]:
            finding = f"the mock's {key} has other lengths than the call's"
            raise Violation(finding, "as many rows as the call", where)
