"""Whether a batch that a component returns is what its keys mean (`key_meaning`), and usable.

A component may return anything. Unusable output is one error that names the component, the sample
and the value; an `Origin` says whose fault it is: that of a component, of a row, or ours.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter, ValidationError

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import (
    DROPPED,
    LOGPROBS,
    MEANINGS,
    REASONS,
    REWARDS,
    SEQUENCES,
    TOKENS,
    WEIGHT_VERSIONS,
    Meaning,
)
from rlcli.api.sample_json import CARRIED
from rlcli.errors import DataError, RlcliError

log = logging.getLogger(__name__)

LARGEST = 1e18
"""Above this, a number's square does not fit into a float32,
nor do sums and deviations that contain it."""
TOO_LARGE = (
    "%s has %g for %s: a float32 cannot hold its square, so standard deviations are infinite"
)
ROUNDING = 0.01
"""How far log-probs may exceed 0: those of probabilities near 1, computed in 16 bits."""

FIELDS = ("ids", "keys", "seqlens", "data", "metadata")
"""What a component sets of a batch; its other fields follow."""
Lengths = Sequence[Sequence[int]]
Segments = list[list[tuple[int, int]]]
"""For each response of a sample (version, tokens) of its segments, in order."""

REASONS_FORM = TypeAdapter(list[list[str | None]])
SEGMENTS_FORM = TypeAdapter(list[list[list[tuple[int, int]]]])
"""For each sample a list with an entry for each response."""


class Origin(Protocol):
    """Turns a fault in a batch into the error shown to the user."""

    def malformed(self, problem: str) -> RlcliError:
        """The batch cannot be read as what it should be; `problem` continues a sentence: `gave
        rewards of shape …`."""

    def not_finite(self, problem: str) -> RlcliError:
        """The batch holds a number that is not finite."""

    def describe(self, id_: Hashable) -> str:
        """How to find a sample: `row-17 (row 17 of dataset train)`."""


@dataclass(frozen=True)
class RowOrigin:
    """A row of a dataset."""

    dataset: str
    row: int
    """Counted from 0; messages count from 1, as lines do."""

    def malformed(self, problem: str) -> RlcliError:
        return DataError(f"row {self.row + 1} of dataset {self.dataset} {problem}", code="F31")

    not_finite = malformed

    def describe(self, id_: Hashable) -> str:
        return str(id_)


def checked_output(
    returned: Any,
    asked: SequenceSample,
    promised: Mapping[str, str],
    origin: Origin,
    device: torch.device,
) -> SequenceSample:
    """The output of a call on the samples of `asked`, detached from its graph and on `device`, if
    it is usable. `promised`: the keys that the call writes, under the interface's names → under the
    graph's names. Missing ones are left to the caller; all other keys are dropped."""
    if returned is None:
        return SequenceSample(ids=asked.ids, seqlens={}, data={})
    reread = _read_again(returned, origin)
    _check_ids(reread.ids, asked.ids, origin)
    output = reread.select(key for key in promised if key in reread.keys)
    output.data = {
        key: _plain(key, tensor, origin).to(device) for key, tensor in output.data.items()
    }
    tokens = output.seqlens.get(SEQUENCES, asked.seqlens.get(SEQUENCES))
    # an empty list makes a float32 tensor, whatever the intended dtype
    for key in output.keys if asked.bs else ():
        meaning = MEANINGS.get(key) or MEANINGS.get(promised[key])
        _KeyCheck(output, key, origin).run(meaning, tokens)
    return output


def checked_row(row: Any, origin: Origin) -> SequenceSample:
    """A row of a dataset, if it is usable: a batch of one sample."""
    sample = _read_again(row, origin)
    if sample.bs != 1:
        raise origin.malformed(f"is a batch of {sample.bs} samples; it must be one")
    sample.data = {key: _plain(key, tensor, origin) for key, tensor in sample.data.items()}
    try:
        json.dumps(sample.metadata)
        _check_keys(sample.metadata)
    except (TypeError, ValueError) as problem:
        raise origin.malformed(
            f"has metadata that cannot be written as JSON: {problem}"
        ) from problem
    for key in sample.keys:
        _KeyCheck(sample, key, origin).run(MEANINGS.get(key), sample.seqlens.get(SEQUENCES))
    return sample


def _check_keys(value: Any) -> None:
    """Raise TypeError for a key that JSON would change into a text."""
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"the key {strange[0]!r:.60} is not a text")
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for inner in value:
        _check_keys(inner)


def read_stats(stats: Any, origin: Origin) -> dict[str, float]:
    """Name → number reported by a call. NaN is accepted here:
    engines decide how a step handles it."""
    if not isinstance(stats, Mapping):
        raise origin.malformed(f"returned {_kind(stats)}, not a dict of numbers")
    if strange := [name for name in stats if not isinstance(name, str)]:
        raise origin.malformed(f"reported a number under {strange[0]!r:.60}, which is not a string")
    return {name: read_number(value, f"reported {name}", origin) for name, value in stats.items()}


def read_reasons(output: SequenceSample, origin: Origin) -> dict[str, list[str | None]]:
    """Sample → why its responses have their rewards, if the call says so."""
    if REASONS not in output.metadata or REWARDS not in output.seqlens:
        return {}
    of_samples, rewards = output.metadata[REASONS], output.seqlens[REWARDS]
    has_form = _has_form(REASONS_FORM, of_samples)
    if not has_form or [*map(len, of_samples)] != [*map(len, rewards)]:
        raise origin.malformed(
            f"returned {REASONS} that are not one list per sample with a text or None for each "
            "response"
        )
    return dict(zip(map(str, output.ids), of_samples, strict=True))


def read_segments(output: SequenceSample, origin: Origin) -> dict[str, Segments]:
    """Sample → the segments of its responses, if the call reports them."""
    of_samples = output.metadata.get(WEIGHT_VERSIONS, [])
    if not _has_form(SEGMENTS_FORM, of_samples):
        raise origin.malformed(
            f"returned {WEIGHT_VERSIONS} that are not a list of (version, tokens) for each "
            "response of each sample"
        )
    return dict(zip(map(str, output.ids), of_samples, strict=bool(of_samples)))


def _has_form(form: TypeAdapter[Any], value: Any) -> bool:
    """Whether a value is of exactly this type."""
    try:
        form.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def read_drops(output: SequenceSample, reasons: Sequence[str], origin: Origin) -> dict[str, str]:
    """Sample → why the call drops it. `reasons`: those that its interface declares."""
    named = zip(output.ids, output.metadata.get(DROPPED) or [None] * output.bs, strict=True)
    dropped = {id_: reason for id_, reason in named if reason is not None}
    for id_, reason in dropped.items():
        if reason not in reasons:
            declared = f"declares {', '.join(reasons)}" if reasons else "declares no reason"
            raise origin.malformed(
                f"dropped sample {origin.describe(id_)} for {reason!r:.60}; its DROPS {declared}"
            )
    return {str(id_): str(reason) for id_, reason in dropped.items()}


def warn_of_changes(call: str, data: SequenceSample, before: Mapping[str, int]) -> None:
    """Warn of a component that changes tensors of its input in place; `before`:
    their versions until then."""
    if changed := [
        key for key, version in versions(data).items() if version != before.get(key, version)
    ]:
        log.warning("%s overwrites %s of its input, which has no effect", call, ", ".join(changed))


def versions(data: SequenceSample) -> dict[str, int]:
    """How often each tensor has been changed in place so far;
    not of tensors that do not count it."""
    return {
        key: tensor._version
        for key, tensor in data.data.items()
        if tensor is not None and not tensor.is_inference()
    }


class _KeyCheck:
    """Raises an error unless a key of a batch holds what its name implies, and only finite
    numbers."""

    def __init__(self, batch: SequenceSample, key: str, origin: Origin):
        self._key = key
        self._tensor: torch.Tensor = batch.data[key]
        self._lengths = dict(zip(batch.ids, batch.seqlens[key], strict=True))
        """Sample → lengths of its sequences."""
        self._origin = origin

    def run(self, meaning: Meaning | None, tokens: Lengths | None) -> None:
        """`tokens`: the lengths of the sequences that the key belongs to, if known."""
        if meaning is not None:
            self._check_form(meaning)
            if tokens is not None and not meaning.has_own_sequences:
                self._check_lengths(meaning, tokens)
        is_real = self._tensor.is_floating_point()
        if is_real:
            self._check_finite()
        if meaning is None:
            return
        if meaning.numbers is LOGPROBS:
            if (first := self._first(self._tensor > ROUNDING)) is not None:
                number, where = first
                raise self._malformed(f"{number:g} for {where}; a log-probability is never above 0")
        elif is_real:
            if (first := self._first(self._tensor.abs() > LARGEST)) is not None:
                log.warning(TOO_LARGE, self._key, *first)
        elif meaning.numbers is TOKENS:
            self._check_tokens()

    def _malformed(self, problem: str) -> RlcliError:
        return self._origin.malformed(f"gave {self._key} {problem}")

    def _check_form(self, meaning: Meaning) -> None:
        if not meaning.numbers.fits(self._tensor.dtype):
            dtype, expected = _name(self._tensor.dtype), meaning.numbers.expected
            raise self._malformed(f"as {dtype}; it must be {expected}")
        if meaning.is_flat and self._tensor.dim() != 1:
            shape = tuple(self._tensor.shape)
            raise self._malformed(f"of shape {shape}; it must have one dimension")

    def _check_lengths(self, meaning: Meaning, tokens: Lengths) -> None:
        for (id_, lengths), of_tokens in zip(self._lengths.items(), tokens, strict=True):
            expected = [meaning.rows(length) for length in of_tokens]
            if lengths != expected:
                sample = self._origin.describe(id_)
                raise self._malformed(
                    f"of lengths {_few(lengths)} for sample {sample}; it must be "
                    f"{meaning.per}: {_few(expected)} for sequences of {_few(of_tokens)} tokens"
                )

    def _check_finite(self) -> None:
        """Check as float32, the dtype of all computation on them."""
        bad = ~self._tensor.to(torch.float32).isfinite()
        if (first := self._first(bad)) is not None:
            number, where = first
            why = "does not fit into a float32" if math.isfinite(number) else "is not finite"
            count = int(bad.sum())
            others = f" ({count} of {bad.numel()} numbers)" if count > 1 else ""
            raise self._origin.not_finite(
                f"gave {self._key} {number:g} for {where}, which {why}{others}"
            )

    def _check_tokens(self) -> None:
        for id_, lengths in self._lengths.items():
            if not all(lengths):
                sequence = f"sequence {lengths.index(0) + 1} of {len(lengths)}"
                raise self._malformed(
                    f"without a token for {sequence} of sample {self._origin.describe(id_)}"
                )
        if (first := self._first(self._tensor < 0)) is not None:
            token, where = first
            raise self._malformed(f"the token {token:.0f} for {where}")

    def _first(self, bad: torch.Tensor) -> tuple[float, str] | None:
        """The first bad number, and where it is."""
        rows = bad.nonzero()
        if not len(rows):
            return None
        return float(self._tensor[tuple(rows[0])]), self._locate(int(rows[0][0]))

    def _locate(self, row: int) -> str:
        """`sample row-17 (row 17 of dataset train), sequence 2 of 4, position 7 of 30`"""
        for id_, lengths in self._lengths.items():
            for number, length in enumerate(lengths, start=1):
                if row < length:
                    sequence = f", sequence {number} of {len(lengths)}" if len(lengths) > 1 else ""
                    position = f", position {row + 1} of {length}" if length > 1 else ""
                    return f"sample {self._origin.describe(id_)}{sequence}{position}"
                row -= length
        raise AssertionError("the row is in no sequence")


def _read_again(returned: Any, origin: Origin) -> SequenceSample:
    """Rebuild the batch with its constructor: its fields may have been changed since."""
    if not isinstance(returned, SequenceSample):
        raise origin.malformed(f"returned {_kind(returned)}, not a SequenceSample")
    if returned.data is None:
        raise origin.malformed("returned a description without data")
    try:
        return SequenceSample(**{name: getattr(returned, name) for name in FIELDS})
    except (ValueError, TypeError) as problem:
        raise origin.malformed(
            f"returned a batch that does not fit together: {problem}"
        ) from problem


def _check_ids(ids: Sequence[Hashable], asked: Sequence[Hashable], origin: Origin) -> None:
    if list(ids) == list(asked):
        return
    missing = [id_ for id_ in asked if id_ not in set(ids)]
    strange = [id_ for id_ in ids if id_ not in set(asked)]
    problems = []
    if missing:
        problems.append(f"nothing for sample {origin.describe(missing[0])}{_more(missing)}")
    if strange:
        problems.append(f"something for {strange[0]!r:.60}{_more(strange)}, not requested")
    if not problems:
        pairs = zip(ids, asked, strict=True)
        returned, expected = next((left, right) for left, right in pairs if left != right)
        where = f"{returned} where sample {origin.describe(expected)} was requested"
        problems.append(f"the samples in another order, {where}")
    raise origin.malformed(f"returned {' and '.join(problems)}; return ids=data.ids")


def _plain(key: str, tensor: torch.Tensor | None, origin: Origin) -> torch.Tensor:
    """Detach the tensor: its graph would stay in memory as long as the sample."""
    if tensor is None:
        raise origin.malformed(f"gave no tensor for {key}")
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = "meta" if tensor.is_meta else _name(tensor.layout)
        raise origin.malformed(f"gave {key} as a {kind} tensor; it must be a plain one")
    if tensor.dtype not in CARRIED:
        raise origin.malformed(
            f"gave {key} as {_name(tensor.dtype)}, which cannot be sent to other ranks"
        )
    return tensor.detach()


def read_number(value: Any, subject: str, origin: Origin) -> float:
    """The number that a call has reported."""
    fits = (
        value.numel() == 1 and not value.is_meta
        if isinstance(value, torch.Tensor)
        else hasattr(value, "__float__")
    )
    if fits and not isinstance(value, complex):
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return float(value)
    raise origin.malformed(f"{subject} as {_kind(value)}, which is not a number")


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    shown = f" ({value!r:.40})" if isinstance(value, str | bytes | complex) else ""
    return f"a value of type {type(value).__name__}{shape}{shown}"


def _name(trait: torch.dtype | torch.layout) -> str:
    return str(trait).removeprefix("torch.")


def _few(lengths: Sequence[int]) -> str:
    return f"[{', '.join(map(str, lengths[:4]))}{', …' if len(lengths) > 4 else ''}]"


def _more(ids: Sequence[Hashable]) -> str:
    return f" and {len(ids) - 1} more" if len(ids) > 1 else ""
