"""Compares what an interface returns with what it returned elsewhere and with what it declares."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import DeclaredKeys
from rlcli.api.key_meaning import DROPPED, REFERENCE, REWARDS, SAMPLED_LOGPROBS
from rlcli.testing.contract import Violation

TOLERANCE = 1e-5
"""Numbers with a smaller relative difference are the same up to rounding to float32."""

DTYPES: Mapping[str, torch.dtype] = {
    **dict.fromkeys((REWARDS, "values", SAMPLED_LOGPROBS, REFERENCE), torch.float32),
    "packed_input_ids": torch.int64,
    "prompt_mask": torch.bool,
    "solved": torch.bool,
    "seq_no_eos_mask": torch.bool,
    "answer_classes": torch.int64,
}
"""Dtypes of well-known keys; numbers are float32."""


def tensor_of(sample: SequenceSample, key: str) -> torch.Tensor:
    """[rows of all samples, …]; it must be there."""
    tensor = (sample.data or {}).get(key)
    assert tensor is not None, f"{key} has no tensor"
    return tensor


def rows(sample: SequenceSample, key: str) -> dict[Hashable, torch.Tensor]:
    """Id of a sample → its rows of `key`."""
    pieces = tensor_of(sample, key).split([sum(lengths) for lengths in sample.seqlens[key]])
    return dict(zip(sample.ids, pieces, strict=True))


def sequences(sample: SequenceSample, key: str) -> list[torch.Tensor]:
    """[N] tensors: the rows of each sequence."""
    return list(tensor_of(sample, key).split(sample.flat_seqlens(key)))


def drops(output: SequenceSample) -> dict[Hashable, Any]:
    """Id of a sample → why a call drops it, or None."""
    return dict(zip(output.ids, output.metadata.get(DROPPED) or [None] * output.bs, strict=True))


def reported_sums(output: SequenceSample) -> dict[str, dict[Hashable, tuple[float, int]]]:
    """Name → id of a sample → (sum, count) of numbers that a call reports in its metadata."""
    return {
        name: dict(zip(output.ids, values, strict=True))
        for name, values in output.metadata.items()
        if any(isinstance(value, tuple) for value in values)
    }


def gap(first: SequenceSample, second: SequenceSample, exact: bool = False) -> str | None:
    """What two outputs drop or report differently, or the number in which they differ most, for the
    ids of `second`; None if they are the same."""
    if first.keys != second.keys:
        before, after = (", ".join(sorted(output.keys)) for output in (first, second))
        return f"the keys are {before} once, {after} the other time"
    different = _gap_of_drops(first, second) or _gap_of_sums(first, second)
    return different or _gap_of_rows(first, second, 0.0 if exact else TOLERANCE)


def _gap_of_drops(first: SequenceSample, second: SequenceSample) -> str | None:
    reasons = drops(first)
    for id_, reason in drops(second).items():
        if reason != reasons[id_]:
            before, after = reasons[id_] or "no", reason or "no"
            return f"sample {id_} is dropped: {before} once, {after} the other time"
    return None


def _gap_of_sums(first: SequenceSample, second: SequenceSample) -> str | None:
    sums = reported_sums(first)
    for name, pairs in reported_sums(second).items():
        for id_, pair in pairs.items():
            expected = sums.get(name, {}).get(id_, (math.nan, 0))
            if pair != pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE):
                before, after = (f"{total:g} of {count}" for total, count in (expected, pair))
                return f"the sum {name} of sample {id_} is {before} once, {after} the other time"
    return None


def _gap_of_rows(first: SequenceSample, second: SequenceSample, allowed: float) -> str | None:
    gaps: list[tuple[float, str]] = []
    for key in first.keys:
        mine, theirs = rows(first, key), rows(second, key)
        lengths = dict(zip(first.ids, first.seqlens[key], strict=True))
        for id_, others in zip(second.ids, second.seqlens[key], strict=True):
            if lengths[id_] != others:
                return (
                    f"the lengths of {key} of sample {id_} are {lengths[id_]} once, {others} the "
                    "other time"
                )
            a, b = mine[id_].double(), theirs[id_].double()
            if not a.numel() or torch.equal(a, b):
                continue
            gap = (a - b).abs()
            size = float((gap / a.abs().clamp(min=1)).nan_to_num(torch.inf).max())
            if size > allowed:
                gaps.append((size, f"{key} of sample {id_} differs by {float(gap.max()):.3g}"))
    return max(gaps)[1] if gaps else None


def check_same(
    first: SequenceSample,
    second: SequenceSample,
    between: str,
    cause: str,
    where: str,
    exact: bool = False,
) -> None:
    """Raise Violation if two outputs differ; `between` describes how they were made."""
    mismatch = gap(first, second, exact)
    if mismatch is not None:
        raise Violation(f"{mismatch} {between}", cause, where)


def check_form(
    output: SequenceSample, ids: list[Hashable], keys: DeclaredKeys | None, where: str
) -> None:
    """Raise Violation unless an output has the samples of its input in order,
    and the declared keys."""
    if output.ids != ids:
        mistake = "other samples" if set(output.ids) != set(ids) else "the samples in another order"
        raise Violation(
            f"it returns {mistake}: {_few(output.ids)} for {_few(ids)}",
            "return the ids of `data` unchanged: ids=data.ids",
            where,
        )
    if keys is not None:
        check_declared(output.keys, keys, "WRITES", "return", where)


def check_declared(
    actual: Collection[str], declared: DeclaredKeys, declaration: str, verb: str, where: str
) -> None:
    """Raise Violation if the keys or heads that a call returns or uses, as `verb` says, are not
    those that a declaration, such as WRITES, names for it."""
    if lacking := sorted(set(declared.needed) - set(actual)):
        raise Violation(
            f"{declaration} names {', '.join(lacking)}, which it does not {verb} (it {verb}s "
            f"{', '.join(sorted(actual)) or 'none'})",
            f"{verb} it, or take it out of {declaration}",
            where,
        )
    if unknown := sorted(set(actual) - set(declared.all)):
        raise Violation(
            f"it {verb}s {', '.join(unknown)}, which {declaration} does not name",
            f"name it in {declaration}: recipes are checked against it",
            where,
        )


def check_drops(output: SequenceSample, reasons: Sequence[str], where: str) -> None:
    """Raise Violation if a sample is dropped for a reason not named in DROPS."""
    unknown = set(drops(output).values()) - {None, *reasons}
    if unknown:
        raise Violation(
            f"it drops samples for {', '.join(map(str, unknown))}, which DROPS does not name",
            "name the reason in DROPS: otherwise it ends a run",
            where,
        )


def check_numbers(output: SequenceSample, where: str) -> None:
    """Raise Violation for an unexpected dtype, a number that is not finite, or one that carries a
    gradient; for a sum in the metadata that has no count."""
    _check_sums(output, where)
    for key in output.keys:
        tensor = tensor_of(output, key)
        expected = DTYPES.get(key, torch.float32 if tensor.is_floating_point() else tensor.dtype)
        if tensor.dtype != expected:
            raise Violation(
                f"{key} is {_name(tensor.dtype)}, not {_name(expected)}",
                "convert it, such as with .float(): other calls compute with it",
                where,
            )
        if tensor.requires_grad:
            raise Violation(
                f"{key} carries a gradient, so all that it was made of stays in memory",
                "compute it by model.module.forward, or under torch.no_grad()",
                where,
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            bad = int((~tensor.isfinite()).sum())
            raise Violation(
                f"{bad} of {tensor.numel()} numbers of {key} are not finite",
                "log of 0, or 0 / 0",
                where,
            )


def _check_sums(output: SequenceSample, where: str) -> None:
    for name, pairs in reported_sums(output).items():
        for id_, pair in pairs.items():
            is_sum = type(pair) is tuple and [*map(type, pair)] == [float, int]
            if not is_sum or not math.isfinite(pair[0]) or pair[1] < 0:
                raise Violation(
                    f"the sum {name} of sample {id_} is {pair!r}",
                    "report (sum, count) as a finite float and an int, for every sample",
                    where,
                )


def check_empty(empty: SequenceSample, usual: SequenceSample, where: str) -> None:
    """Raise Violation unless an output for no samples has the keys and dtypes of the usual one, and
    no rows."""
    for key in usual.keys:
        if key not in empty.keys:
            raise Violation(f"{key} is missing", "a rank may hold no sample at all", where)
        now, expected = tensor_of(empty, key), tensor_of(usual, key)
        if len(now) or now.dtype != expected.dtype:
            raise Violation(
                f"{key} of no samples has {len(now)} rows of {now.dtype}, else {expected.dtype}",
                "give the dtype of a tensor that may be empty",
                where,
            )


def frozen_copy(sample: SequenceSample) -> SequenceSample:
    """A copy that shares nothing with the batch, for later comparison."""
    return copy.deepcopy(sample)


def check_untouched(batch: SequenceSample, before: SequenceSample, where: str) -> None:
    """Raise Violation if a batch has changed."""
    changed = [
        attribute
        for attribute in ("ids", "metadata", "keys", "seqlens")
        if getattr(batch, attribute) != getattr(before, attribute)
    ]
    for key in () if changed else batch.keys:
        now, then = tensor_of(batch, key), tensor_of(before, key)
        if now.dtype != then.dtype or not torch.equal(now, then):
            changed.append(f"entries of {key}")
    if changed:
        raise Violation(
            f"it changes {', '.join(changed)} in its input",
            "other calls read the same tensors: work on a copy (clone, torch.where), never in "
            "place",
            where,
        )


def _few(ids: list[Hashable]) -> str:
    return ", ".join(map(str, ids[:4])) + (" …" if len(ids) > 4 else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
