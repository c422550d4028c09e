"""The lengths of the sequences of a key: as people write them,
or inferred from the key's meaning."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from rlcli.api.key_meaning import MEANINGS, full, minus_one, one
from rlcli.api.partition import flat2d

if TYPE_CHECKING:
    import numpy
    import torch

Lengths = list[list[int]]
"""Outer: the samples of a batch; inner: the sequences of one sample."""


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a torch tensor; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> TypeGuard[numpy.ndarray]:
    """Whether it is a numpy array; numpy is not imported to find out."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def read_length(value: Any, subject: str) -> int:
    """A whole number ≥ 0. Booleans, strings and floats are refused, not converted."""
    try:
        length = None if isinstance(value, bool) or is_tensor(value) else operator.index(value)
    except TypeError:
        length = None
    if length is None:
        raise ValueError(f"{subject}: {value!r} is not a length (a whole number)")
    if length < 0:
        raise ValueError(f"{subject}: length {length} is negative")
    return length


def read_lengths(value: Any, subject: str) -> Lengths:
    """Lists of ints from the lengths given for one key: a list, tuple,
    1-D tensor or array over the samples.

    Each entry is an int (a sample with one sequence) or, again, a list, tuple,
    1-D tensor or array of ints.
    """
    # the usual case; the general way takes five times as long
    if type(value) is list and all(map(_is_plain, value)):
        return [list(entry) for entry in value]
    lengths = []
    for entry in _items(value, subject):
        of_sample = _items(entry, subject) if _is_sequence(entry) else [entry]
        lengths.append([read_length(length, subject) for length in of_sample])
    return lengths


def _is_plain(entry: Any) -> bool:
    """Whether it is a list of valid lengths, none of which needs a conversion."""
    return type(entry) is list and {*map(type, entry)} <= {int} and min(entry, default=0) >= 0


def _is_sequence(value: Any) -> bool:
    if is_tensor(value) or is_array(value):
        return value.ndim > 0
    return isinstance(value, list | tuple)


def _items(value: Any, subject: str) -> Iterable[Any]:
    if is_tensor(value) or is_array(value):
        kind = value.dtype.kind if is_array(value) else _kind(cast(Any, value).dtype)
        if kind not in "iu" and len(value):
            raise ValueError(f"{subject}: lengths of dtype {value.dtype} are not whole numbers")
        return value.tolist()
    if isinstance(value, list | tuple):
        return [v.item() if is_tensor(v) and v.ndim == 0 else v for v in value]
    raise ValueError(f"{subject}: {value!r} is not a list of lengths")


def _kind(dtype: torch.dtype) -> str:
    return (
        "b"
        if str(dtype) == "torch.bool"
        else "f"
        if dtype.is_floating_point or dtype.is_complex
        else "i"
    )


def infer_lengths(key: str, tensor: torch.Tensor | None, lengths: Lengths) -> Lengths:
    """The lengths of `key` in samples whose sequences have `lengths` tokens.

    A well-known key has its own rule. Any other key must fit exactly one of: as many rows as
    tokens, one row less per sequence, one row per sequence.
    """
    rules = [MEANINGS[key].rows] if key in MEANINGS else [full, minus_one, one]
    candidates: list[Lengths] = []
    for rule in rules:
        candidate = [[rule(length) for length in sample] for sample in lengths]
        if candidate not in candidates:
            candidates.append(candidate)
    if tensor is None:
        if len(candidates) == 1:
            return candidates[0]
        raise ValueError(
            f"the lengths of {key!r} cannot be inferred without its tensor; give seqlens as a dict"
        )
    rows = tensor.shape[0] if tensor.ndim else 0
    fitting = [candidate for candidate in candidates if rows_of(candidate) == rows]
    if len(fitting) == 1:
        return fitting[0]
    totals = " or ".join(str(rows_of(candidate)) for candidate in candidates)
    problem = "fits more than one reading" if fitting else f"should have {totals}"
    raise ValueError(
        f"{key!r} has {rows} rows, which {problem} for sequences of lengths {lengths}; "
        "give the lengths of every key as a dict of seqlens"
    )


def rows_of(lengths: Sequence[Sequence[int]]) -> int:
    """Number of rows of a key: the sum over samples and sequences."""
    return sum(flat2d(lengths))
