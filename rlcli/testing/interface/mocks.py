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
    check_likeness(mock, calls, where)
    check_numbers(mock, where)
    if calls.mock(calls.batch.select_indices([])).keys != mock.keys:
        raise Violation(
            "the mock of no samples has other keys", "a rank may hold no sample at all", where
        )
    cause = "draw from stable_seed of the sample's id, and from nothing else"
    check_same(mock, calls.mock(calls.batch), "between two mocks alike", cause, where, exact=True)
    alone = calls.mock(calls.batch.select_indices([1]))
    check_same(mock, alone, "when it is mocked alone", cause, where, exact=True)


def check_likeness(mock: SequenceSample, calls: CallTrial, where: str) -> None:
    """Raise Violation unless a mock has the keys, lengths and dtypes of the call's result."""
    is_own = overrides(calls.interface, "mock")
    for kind in ("keys", "metadata") if is_own else ():
        mine, expected = (sorted(getattr(sample, kind)) for sample in (mock, calls.result))
        if mine != expected:
            raise Violation(
                f"the mock has the {kind} {', '.join(mine)}, the call {', '.join(expected)}",
                f"return the same {kind}",
                where,
            )
    for key in mock.keys:
        fault = _fault(mock, calls, key, is_own)
        if fault is not None:
            raise Violation(*fault, where)


def _fault(
    mock: SequenceSample, calls: CallTrial, key: str, is_own: bool
) -> tuple[str, str] | None:
    """(what is wrong with a key of a mock, the cause), if anything is."""
    form, of_call = _form(mock, key), _form(calls.result, key)
    if is_own and form != of_call:
        finding = f"the mock's {key} is {form}, the call's {of_call}"
        return finding, "a graph of mocks must fail where the real one does"
    has_own_lengths = key in MEANINGS and MEANINGS[key].has_own_sequences
    keeps_lengths = calls.call == "inference" and not has_own_lengths
    if keeps_lengths and mock.seqlens[key] != calls.result.seqlens[key]:
        return f"the mock's {key} has other lengths than the call's", "as many rows as the call"
    return None


def _form(sample: SequenceSample, key: str) -> str:
    return f"{sample.dtypes[key]} {sample.trailing_shapes[key]}"
