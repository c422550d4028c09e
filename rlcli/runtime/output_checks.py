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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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
    REWARDS,
    SEQUENCES,
    SOLVED,
    TOKENS,
    Meaning,
)
from rlcli.api.sample_json import CARRIED
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
        check_key(output, key, MEANINGS.get(key) or MEANINGS.get(promised[key]), tokens, origin)
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
        check_key(sample, key, MEANINGS.get(key), sample.seqlens.get(SEQUENCES), origin)
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
    return {
        name: Moments.of([_number(value, f"counted {name}", origin) for value in values])
        for name, values in metadata.items()
        if values and all(type(value) in (int, float) for value in values)
    }


def read_sums(metadata: Mapping[str, Sequence[Any]]) -> dict[str, Moments]:
    """The numbers that a call attaches to its samples as (sum, count),
    of their sequences or tokens."""
    return {
        name: sum((Moments(total, 0.0, count) for total, count in values), Moments())
        for name, values in metadata.items()
        if values and all(_is_sum(value) for value in values)
    }


def _is_sum(value: Any) -> bool:
    return type(value) is tuple and [type(number) for number in value] == [float, int]


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


def check_key(
    sample: SequenceSample,
    key: str,
    meaning: Meaning | None,
    tokens: Lengths | None,
    origin: Origin,
) -> None:
    """Raise an error unless a key holds what its name implies, and only finite numbers. `tokens`:
    the lengths of the sequences that it belongs to, if known."""
    tensor = sample.data[key]
    if meaning is not None:
        if not meaning.numbers.fits(tensor.dtype):
            raise origin.malformed(
                f"gave {key} as {_name(tensor.dtype)}; it must be {meaning.numbers.expected}"
            )
        if meaning.is_flat and tensor.dim() != 1:
            raise origin.malformed(
                f"gave {key} of shape {tuple(tensor.shape)}; it must have one dimension"
            )
        if tokens is not None and not meaning.has_own_sequences:
            _check_lengths(sample, key, meaning, tokens, origin)
    _check_finite(sample, key, origin)
    if meaning is None:
        return
    if meaning.numbers is LOGPROBS:
        _check_logprobs(sample, key, origin)
        return
    _warn_of_size(sample, key, origin)
    if meaning.numbers is TOKENS:
        _check_tokens(sample, key, origin)


def _check_lengths(
    sample: SequenceSample, key: str, meaning: Meaning, tokens: Lengths, origin: Origin
) -> None:
    for id_, lengths, of_tokens in zip(sample.ids, sample.seqlens[key], tokens, strict=True):
        expected = [meaning.rows(length) for length in of_tokens]
        if lengths != expected:
            raise origin.malformed(
                f"gave {key} of lengths {_few(lengths)} for sample {origin.describe(id_)}; it must "
                f"be {meaning.per}: {_few(expected)} for sequences of {_few(of_tokens)} tokens"
            )


def _check_finite(sample: SequenceSample, key: str, origin: Origin) -> None:
    """Check as float32, the dtype of all computation on them."""
    tensor = sample.data[key]
    if not tensor.is_floating_point():
        return
    bad = ~tensor.to(torch.float32).isfinite()
    if (first := _first(tensor, bad)) is not None:
        row, value = first
        why = "does not fit into a float32" if math.isfinite(value) else "is not finite"
        count = int(bad.sum())
        others = f" ({count} of {bad.numel()} numbers)" if count > 1 else ""
        raise origin.not_finite(
            f"gave {key} {value:g} for {_locate(sample, key, row, origin)}, which {why}{others}"
        )


def _warn_of_size(sample: SequenceSample, key: str, origin: Origin) -> None:
    tensor = sample.data[key]
    if tensor.is_floating_point() and (first := _first(tensor, tensor.abs() > LARGEST)) is not None:
        row, value = first
        words = (
            "%s has %g for %s: a float32 cannot hold its square, so standard "
            "deviations are infinite"
        )
        log.warning(words, key, value, _locate(sample, key, row, origin))


def _check_logprobs(sample: SequenceSample, key: str, origin: Origin) -> None:
    tensor = sample.data[key]
    if (first := _first(tensor, tensor > ROUNDING)) is not None:
        row, value = first
        message = f"gave {key} {value:g} for {_locate(sample, key, row, origin)}"
        raise origin.malformed(f"{message}; a log-probability is never above 0")


def _check_tokens(sample: SequenceSample, key: str, origin: Origin) -> None:
    for id_, lengths in zip(sample.ids, sample.seqlens[key], strict=True):
        if not all(lengths):
            where = (
                f"sequence {lengths.index(0) + 1} of {len(lengths)} of sample "
                f"{origin.describe(id_)}"
            )
            raise origin.malformed(f"gave {key} without a token for {where}")
    tensor = sample.data[key]
    if (first := _first(tensor, tensor < 0)) is not None:
        row, token = first
        raise origin.malformed(
            f"gave {key} the token {token:.0f} for {_locate(sample, key, row, origin)}"
        )


def _first(tensor: torch.Tensor, bad: torch.Tensor) -> tuple[int, float] | None:
    """The first bad number, and its row."""
    rows = bad.nonzero()
    if not len(rows):
        return None
    return int(rows[0][0]), float(tensor[tuple(rows[0])])


def _locate(sample: SequenceSample, key: str, row: int, origin: Origin) -> str:
    """`sample row-17 (row 17 of dataset train), sequence 2 of 4, position 7 of 30`"""
    for id_, lengths in zip(sample.ids, sample.seqlens[key], strict=True):
        for number, length in enumerate(lengths, start=1):
            if row < length:
                sequence = f", sequence {number} of {len(lengths)}" if len(lengths) > 1 else ""
                position = f", position {row + 1} of {length}" if length > 1 else ""
                return f"sample {origin.describe(id_)}{sequence}{position}"
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
    advice = "return ids=data.ids"
    if not missing and not strange:
        returned, expected = next(
            pair for pair in zip(ids, asked, strict=True) if pair[0] != pair[1]
        )
        where = f"{returned} where sample {origin.describe(expected)} was asked for"
        raise origin.malformed(f"returned the samples in another order, {where}; {advice}")
    problems = (
        [f"nothing for sample {origin.describe(missing[0])}{_more(missing)}"] if missing else []
    )
    problems += (
        [f"something for {strange[0]!r:.60}{_more(strange)}, not asked for"] if strange else []
    )
    raise origin.malformed(f"returned {' and '.join(problems)}; {advice}")


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
    shown = _shown(output, of_reward).items()
    numbers = {name: [_mean(group) for group in _groups(output, key)] for name, key in shown}
    if SOLVED in output.keys:
        numbers |= _of_groups(output)
    if PROMPT_MASK in output.keys:
        masks = _sequences(output, PROMPT_MASK)
        numbers["response_length"] = [
            _mean([float((~mask).sum()) for mask in group]) for group in masks
        ]
    if NOT_ENDED in output.keys:
        numbers["no_eos_fraction"] = [_mean(group) for group in _groups(output, NOT_ENDED)]
    return numbers


def _of_groups(output: SequenceSample) -> dict[str, list[float]]:
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
        votes = [
            majority([int(answer) for answer in group]) for group in _groups(output, ANSWER_CLASSES)
        ]
        won = (
            (vote is not None and group[vote]) for vote, group in zip(votes, solved, strict=True)
        )
        numbers[f"majority@{n}"] = list(map(float, won))
    return numbers


def _groups(output: SequenceSample, key: str) -> list[list[float]]:
    """For each prompt, its responses' values under a key with one number per response."""
    return [
        torch.cat(list(group)).double().tolist() if group else []
        for group in _sequences(output, key)
    ]


def _sequences(output: SequenceSample, key: str) -> Iterator[Sequence[torch.Tensor]]:
    pieces = iter(output.data[key].cpu().split(output.flat_seqlens(key)))
    for group in output.seqlens[key]:
        yield [next(pieces) for _ in group]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
