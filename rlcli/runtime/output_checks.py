"""What a component returns: checked before anything is stored, counted or trained on,
and then measured.

A component may return anything. Unusable output ends the run with one error that names the
component, the sample and the value. What an evaluation measures of a usable one is a number per
prompt.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.dataflow import MFCDef
from rlcli.api.key_meaning import (
    ANSWER_CLASSES,
    DROPPED,
    LOGPROBS,
    MEANINGS,
    NOT_ENDED,
    PROMPT_MASK,
    REASONS,
    REWARDS,
    SEQUENCES,
    SOLVED,
    TOKENS,
    WEIGHT_VERSIONS,
    Meaning,
)
from rlcli.api.sample_json import CARRIED
from rlcli.errors import RlcliError
from rlcli.ops.evaluation import majority, pass_at_k
from rlcli.runtime.faults import Origin

log = logging.getLogger(__name__)

LARGEST = 1e18
"""Above this, a number's square does not fit into a float32,
nor do sums and deviations that contain it."""
ROUNDING = 0.01
"""How far log-probs may exceed 0: those of probabilities near 1, computed in 16 bits."""

FIELDS = ("ids", "keys", "seqlens", "data", "metadata")
"""What a component sets of a batch; its other fields follow."""
Lengths = Sequence[Sequence[int]]
Segments = list[list[tuple[int, int]]]
"""For each response of a sample (version, tokens) of its segments, in order."""


class Moments(NamedTuple):
    """What the mean of some numbers and its standard error require: two sums, and how many numbers
    there are. Those of several ranks can be added."""

    total: float = 0.0
    squares: float = 0.0
    size: int = 0

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Moments:
        return cls(sum(numbers), sum(number * number for number in numbers), len(numbers))

    def __add__(self, added: Moments) -> Moments:  # type: ignore[override]
        return Moments(
            self.total + added.total, self.squares + added.squares, self.size + added.size
        )

    @property
    def mean(self) -> float:
        return self.total / self.size if self.size else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, from the spread of the numbers; NaN for fewer than two."""
        if self.size < 2:
            return math.nan
        spread = max(0.0, self.squares - self.total * self.mean) / (self.size - 1)
        return math.sqrt(spread / self.size)


def output_names(mfc: MFCDef) -> dict[str, str]:
    """The keys that a call writes: the interface's name → the graph's name."""
    return {key: mfc.output_key_remap.get(key, key) for key in mfc.output_keys}


def read_output(
    mfc: MFCDef, data: SequenceSample, returned: Any, origin: Origin, device: torch.device
) -> tuple[SequenceSample, dict[str, Moments], dict[str, str]]:
    """What a call returned for `data`, if it is usable; the numbers that it counted; and the
    samples that it drops. The output's metadata is what the call added."""
    output = checked_output(returned, data, output_names(mfc), origin, device)
    output.metadata = {
        name: values for name, values in output.metadata.items() if name not in data.metadata
    }
    return output, read_counts(output.metadata, origin), read_drops(output, mfc.drops, origin)


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
    except (TypeError, ValueError) as problem:
        raise origin.malformed(
            f"has metadata that cannot be written as JSON: {problem}"
        ) from problem
    for key in sample.keys:
        _KeyCheck(sample, key, origin).run(MEANINGS.get(key), sample.seqlens.get(SEQUENCES))
    return sample


def read_stats(stats: Any, origin: Origin) -> dict[str, float]:
    """Name → number reported by a call. NaN is accepted here:
    engines decide how a step handles it."""
    if not isinstance(stats, Mapping):
        raise origin.malformed(f"returned {_kind(stats)}, not a dict of numbers")
    if strange := [name for name in stats if not isinstance(name, str)]:
        raise origin.malformed(f"reported a number under {strange[0]!r:.60}, which is not a string")
    return {name: _number(value, f"reported {name}", origin) for name, value in stats.items()}


def read_counts(metadata: Mapping[str, Sequence[Any]], origin: Origin) -> dict[str, Moments]:
    """The numbers that a call attaches to its samples, such as errors of a reward."""
    counts: dict[str, Moments] = {}
    for name, values in metadata.items():
        if values and all(type(value) in (int, float) for value in values):
            numbers = [_number(value, f"counted {name}", origin) for value in values]
            counts[name] = Moments.of(numbers)
    return counts


def read_sums(metadata: Mapping[str, Sequence[Any]]) -> dict[str, Moments]:
    """The numbers that a call attaches to its samples as (sum, count),
    of their sequences or tokens."""
    sums: dict[str, Moments] = {}
    for name, values in metadata.items():
        if values and all(map(_is_sum, values)):
            sums[name] = sum((Moments(total, 0.0, count) for total, count in values), Moments())
    return sums


def _is_sum(value: Any) -> bool:
    return type(value) is tuple and [type(number) for number in value] == [float, int]


def read_reasons(output: SequenceSample, origin: Origin) -> dict[str, list[str | None]]:
    """Sample → why its responses have their rewards, if the call says so."""
    if REASONS not in output.metadata or REWARDS not in output.seqlens:
        return {}
    of_samples = output.metadata[REASONS]
    for reasons, responses in zip(of_samples, output.seqlens[REWARDS], strict=True):
        is_list = isinstance(reasons, list) and len(reasons) == len(responses)
        if not is_list or not all(isinstance(reason, str | None) for reason in reasons):
            raise origin.malformed(
                f"returned {REASONS} that are not a list for each sample, of a text or None for "
                "each response"
            )
    return dict(zip(map(str, output.ids), of_samples, strict=True))


def read_segments(output: SequenceSample, origin: Origin) -> dict[str, Segments]:
    """Sample → the segments of its responses, if the call reports them."""
    of_samples = output.metadata.get(WEIGHT_VERSIONS, [])
    for responses in of_samples:
        if not isinstance(responses, list) or not all(map(_are_spans, responses)):
            raise origin.malformed(
                f"returned {WEIGHT_VERSIONS} that are not a list of (version, tokens) for each "
                "response of each sample"
            )
    return dict(zip(map(str, output.ids), of_samples, strict=bool(of_samples)))


def _are_spans(segments: Any) -> bool:
    return isinstance(segments, list) and all(map(_is_span, segments))


def _is_span(span: Any) -> bool:
    return isinstance(span, tuple) and [type(number) for number in span] == [int, int]


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
        self._batch = batch
        self._key = key
        self._tensor: torch.Tensor = batch.data[key]
        self._origin = origin

    def run(self, meaning: Meaning | None, tokens: Lengths | None) -> None:
        """`tokens`: the lengths of the sequences that the key belongs to, if known."""
        if meaning is None:
            self._check_finite()
            return
        self._check_form(meaning)
        if tokens is not None and not meaning.has_own_sequences:
            self._check_lengths(meaning, tokens)
        self._check_finite()
        if meaning.numbers is LOGPROBS:
            self._check_logprobs()
            return
        self._warn_of_size()
        if meaning.numbers is TOKENS:
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
        lengths_of = zip(self._batch.ids, self._batch.seqlens[self._key], tokens, strict=True)
        for id_, lengths, of_tokens in lengths_of:
            expected = [meaning.rows(length) for length in of_tokens]
            if lengths != expected:
                sample = self._origin.describe(id_)
                raise self._malformed(
                    f"of lengths {_few(lengths)} for sample {sample}; it must be "
                    f"{meaning.per}: {_few(expected)} for sequences of {_few(of_tokens)} tokens"
                )

    def _check_finite(self) -> None:
        """Check as float32, the dtype of all computation on them."""
        if not self._tensor.is_floating_point():
            return
        bad = ~self._tensor.to(torch.float32).isfinite()
        if (first := self._first(bad)) is not None:
            value, where = first
            why = "does not fit into a float32" if math.isfinite(value) else "is not finite"
            count = int(bad.sum())
            others = f" ({count} of {bad.numel()} numbers)" if count > 1 else ""
            raise self._origin.not_finite(
                f"gave {self._key} {value:g} for {where}, which {why}{others}"
            )

    def _warn_of_size(self) -> None:
        if not self._tensor.is_floating_point():
            return
        if (first := self._first(self._tensor.abs() > LARGEST)) is not None:
            words = (
                "%s has %g for %s: a float32 cannot hold its square, so standard "
                "deviations are infinite"
            )
            log.warning(words, self._key, *first)

    def _check_logprobs(self) -> None:
        if (first := self._first(self._tensor > ROUNDING)) is not None:
            value, where = first
            raise self._malformed(f"{value:g} for {where}; a log-probability is never above 0")

    def _check_tokens(self) -> None:
        for id_, lengths in zip(self._batch.ids, self._batch.seqlens[self._key], strict=True):
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
        for id_, lengths in zip(self._batch.ids, self._batch.seqlens[self._key], strict=True):
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


def _number(value: Any, subject: str, origin: Origin) -> float:
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


def scores_of(
    output: SequenceSample, names: Mapping[str, str], *, evaluates: bool
) -> dict[str, list[float]]:
    """Scores in a call's outputs: in training one number per response, in an evaluation one per
    prompt. `names`: the interface's name for a key → key of the batch."""
    of_reward = tuple(names.values()) if REWARDS in names else ()
    if evaluates:
        return measures(output, of_reward)
    return {
        name: output.data[key].double().tolist() for name, key in _shown(output, of_reward).items()
    }


def _shown(output: SequenceSample, of_reward: Iterable[str]) -> dict[str, str]:
    """Name → key of the scores to report. `of_reward`: the output keys of a call that gives
    rewards, all of whose scores are reported."""
    unnamed = {
        key: key
        for key in of_reward
        if key not in MEANINGS and key in output.keys and _is_score(output, key)
    }
    return unnamed | {
        meaning.shown_as: key
        for key, meaning in MEANINGS.items()
        if meaning.shown_as and key in output.keys
    }


def _is_score(output: SequenceSample, key: str) -> bool:
    tensor, lengths = output.data[key], output.flat_seqlens(key)
    return (
        tensor is not None
        and tensor.dim() == 1
        and set(lengths) <= {1}
        and not tensor.dtype.is_complex
    )


def measures(output: SequenceSample, of_reward: Iterable[str] = ()) -> dict[str, list[float]]:
    """What an evaluation reports of a call's outputs: name → one number per prompt;
    `of_reward` as above.

    The means of scores over the responses to a prompt (`reward`, `accuracy`); with several
    responses to each prompt, `pass@k` for k = 2, 4, 8, … and for all n of them, and `majority@n`,
    whether the most frequent final answer is right; `response_length` in tokens; `no_eos_fraction`,
    the share that was cut off.
    """
    shown = _shown(output, of_reward)
    numbers = {name: _means(_groups(output, key)) for name, key in shown.items()}
    if SOLVED in output.keys:
        numbers |= _pass_rates(output)
    if PROMPT_MASK in output.keys:
        numbers["response_length"] = _means(_response_lengths(output))
    if NOT_ENDED in output.keys:
        numbers["no_eos_fraction"] = _means(_groups(output, NOT_ENDED))
    return numbers


def _pass_rates(output: SequenceSample) -> dict[str, list[float]]:
    """`pass@k` and `majority@n`, if every prompt has the same number of responses,
    and more than one."""
    solved = [[score >= 1 for score in group] for group in _groups(output, SOLVED)]
    sizes = {len(group) for group in solved}
    n = sizes.pop() if len(sizes) == 1 else 1
    if n < 2:
        return {}
    samples, correct = torch.full((len(solved),), n), torch.tensor([sum(group) for group in solved])
    ks = [*(2**power for power in range(1, n.bit_length()) if 2**power < n), n]
    numbers = {f"pass@{k}": pass_at_k(samples, correct, k).tolist() for k in ks}
    if ANSWER_CLASSES in output.keys:
        answers = _groups(output, ANSWER_CLASSES)
        numbers[f"majority@{n}"] = [
            _is_vote_right(*group) for group in zip(answers, solved, strict=True)
        ]
    return numbers


def _is_vote_right(answers: Iterable[float], solved: Sequence[bool]) -> float:
    """Whether the most frequent answer to a prompt is right: 1 or 0."""
    vote = majority([int(answer) for answer in answers])
    return float(vote is not None and solved[vote])


def _groups(output: SequenceSample, key: str) -> list[list[float]]:
    """For each prompt, its responses' values under a key with one number per response."""
    numbers = iter(output.data[key].double().tolist())
    return [list(islice(numbers, sum(lengths))) for lengths in output.seqlens[key]]


def _response_lengths(output: SequenceSample) -> list[list[int]]:
    """For each prompt, the tokens of its responses."""
    masks = output.data[PROMPT_MASK].cpu().split(output.flat_seqlens(PROMPT_MASK))
    tokens = (int((~mask).sum()) for mask in masks)
    return [list(islice(tokens, len(lengths))) for lengths in output.seqlens[PROMPT_MASK]]


def _means(groups: Iterable[Sequence[float]]) -> list[float]:
    """The mean of each group; 0 of an empty one."""
    return [sum(group) / len(group) if group else 0.0 for group in groups]
