"""Prompts, responses and their rewards: samples.jsonl."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import nsmallest
from pathlib import Path
from typing import Any

from rlcli.errors import DataError, escape_control
from rlcli.files import replace_file
from rlcli.observe.json_lines import (
    JsonLines,
    Warn,
    encode,
    is_nonfinite,
    plain_number,
    read_json_lines,
)
from rlcli.observe.series import short

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """One prompt with one response. The texts come from the model: print them through
    `escape_control`."""

    step: int
    id: str | int
    """Id of the dataset row."""
    prompt: str
    response: str
    reward: float | None = None
    answer: str | None = None
    """The ground truth, if the dataset has one."""
    phase: str = "train"
    """train or eval."""
    number: int = 0
    """Index of the response among those to this prompt, from 0."""
    finish: str | None = None
    """stop: the response ended by itself; length: it was truncated. None if unknown."""
    logprob: float | None = None
    """Sum of the log-probs with which its tokens were sampled, in nats."""
    length: int | None = None
    """Tokens of the response."""
    advantage: float | None = None
    """Mean over the tokens of the response; None if none was computed."""
    reason: str | None = None
    """Why it has its reward, as far as the reward says."""
    turns: Sequence[Mapping[str, Any]] | None = None
    """Of an episode of several turns: its turns, and what was observed after each but the last, in
    order. `text`, `tokens`, and `sampled`: whether the policy wrote it, so that it is trained on.
    Where the template has rewritten what was before, the policy read it again: `repeated` is the
    number of tokens that stayed the same, which `text` leaves out."""
    turn_rewards: Sequence[float | None] | None = None
    """The reward of each turn, if turns have rewards."""
    tokens: Sequence[str] | None = None
    """The texts of the tokens after the prompt; of the first response to a prompt only, unless it
    is long."""
    token_logprobs: Sequence[float | None] | None = None
    """The log-prob with which each of them was sampled, in nats; None for those that were
    observed."""
    token_advantages: Sequence[float | None] | None = None
    versions: Sequence[Sequence[int]] | None = None
    """[version of the weights, sampled tokens] of each segment, if they changed meanwhile."""

    def parts(self) -> list[tuple[str, str]]:
        """The response as (label, text): a single part, or each turn and what was observed between
        them."""
        if not self.turns:
            return [("response", self.response)]
        rewards = iter(self.turn_rewards or ())
        parts, number = [], 0
        for turn in self.turns:
            if not turn["sampled"]:
                label = "rewritten" if "repeated" in turn else "observed"
                parts.append((label, turn["text"]))
                continue
            number += 1
            reward = next(rewards, None)
            shown = "" if reward is None else f"  [reward {short(reward)}]"
            parts.append((f"turn {number}", turn["text"].strip("\n") + shown))
        return parts


class SampleWriter:
    """Appends to samples.jsonl."""

    def __init__(self, path: Path, warn: Warn = log.warning):
        self.lines = JsonLines(path, warn)

    def write(self, sample: SampleRecord) -> None:
        self.lines.write(_fields(sample))

    def close(self) -> None:
        self.lines.close()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_samples(path: Path, samples: Iterable[SampleRecord]) -> None:
    """Write a file with these samples alone, in place of what was there. Raises OSError."""
    lines = (f"{encode(_fields(sample))}\n".encode() for sample in samples)
    replace_file(path, b"".join(lines))


def _fields(sample: SampleRecord) -> dict[str, Any]:
    """The fields of a sample as JSON has them: its numbers are Python's, and finite."""
    fields = {key: plain_number(value) for key, value in asdict(sample).items()}
    for name in NUMBERS:
        fields[name] = None if is_nonfinite(fields[name]) else fields[name]
    return fields


TEXTS = ("prompt", "response", "phase")
NUMBERS = ("reward", "logprob", "advantage", "length")
LARGEST = 1 << 63
"""Whole numbers that are larger have not been written by a run."""


def iterate_samples(path: Path) -> Iterator[SampleRecord]:
    """The samples of a file, in order. Raises DataError for a line that is not a sample."""
    for fields in read_json_lines(path):
        try:
            record = SampleRecord(**fields)
        except TypeError as error:
            raise _not_a_sample(path, str(error)) from None
        if not (
            _has_valid_types(record) and _has_valid_turns(record) and _has_valid_tokens(record)
        ):
            raise _not_a_sample(path, "a field has the wrong type")
        yield record


def _has_valid_types(record: SampleRecord) -> bool:
    texts = all(isinstance(getattr(record, name), str) for name in TEXTS)
    numbers = all(_is_number(getattr(record, name)) for name in NUMBERS)
    return (
        texts
        and numbers
        and _is_count(record.step)
        and _is_count(record.number)
        and isinstance(record.id, str | int)
        and isinstance(record.finish, str | None)
        and isinstance(record.answer, str | None)
        and isinstance(record.reason, str | None)
    )


def _has_valid_turns(record: SampleRecord) -> bool:
    turns, rewards = record.turns, record.turn_rewards
    if not (isinstance(turns, list | None) and isinstance(rewards, list | None)):
        return False
    return all(map(_is_number, rewards or ())) and all(map(_is_turn, turns or ()))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < LARGEST


def _is_number(value: Any) -> bool:
    return isinstance(value, float | None) or _is_count(value)


def _is_turn(turn: Any) -> bool:
    return (
        isinstance(turn, dict)
        and isinstance(turn.get("text"), str)
        and isinstance(turn.get("sampled"), bool)
    )


def _has_valid_tokens(record: SampleRecord) -> bool:
    return (
        _is_list_of(str, record.tokens)
        and _is_list_of(object, record.token_logprobs)
        and _is_list_of(object, record.token_advantages)
        and all(map(_is_number, record.token_logprobs or ()))
        and all(map(_is_number, record.token_advantages or ()))
        and _is_list_of(list, record.versions)
        and all(len(span) == 2 and _is_list_of(int, span) for span in record.versions or ())
    )


def _is_list_of(kind: Any, field: Any) -> bool:
    """Whether a field, if there is one, is a list of this kind of entries."""
    if not isinstance(field, list):
        return field is None
    return all(isinstance(entry, kind) for entry in field)


def read_samples(path: Path) -> list[SampleRecord]:
    """All samples of a file. Raises DataError."""
    return list(iterate_samples(path))


def _not_a_sample(path: Path, why: str) -> DataError:
    return DataError(f"a line is not a sample: {escape_control(why)}", where=str(path), code="F31")


@dataclass(frozen=True)
class SampleSelection:
    """A selection of a file's samples."""

    steps: Sequence[int] = ()
    """Only samples of these steps; empty: the last step,
    or any step if there is something to search for."""
    phase: str | None = None
    id: str | None = None
    pattern: re.Pattern[str] | None = None
    """Pattern that the prompt or the response contains."""
    every_step: bool = False
    """Search all steps, also for nothing in particular."""

    def matches(self, sample: SampleRecord) -> bool:
        """Whether a sample matches in everything but the step."""
        if self.id not in (None, str(sample.id)) or self.phase not in (None, sample.phase):
            return False
        if self.pattern is None:
            return True
        return any(self.pattern.search(text) for text in (sample.response, sample.prompt))


def select_samples(
    samples: Iterable[SampleRecord], selection: SampleSelection
) -> list[SampleRecord]:
    """The selected samples, in order."""
    is_search = selection.id is not None or selection.pattern is not None
    is_last_step_only = not (selection.steps or is_search or selection.every_step)
    selected: list[SampleRecord] = []
    for sample in matching(samples, selection):
        if is_last_step_only and selected and sample.step != selected[-1].step:
            selected.clear()
        selected.append(sample)
    return selected


def matching(samples: Iterable[SampleRecord], selection: SampleSelection) -> Iterator[SampleRecord]:
    """Those of the steps of a selection, or of any step, that match it."""
    for sample in samples:
        if selection.matches(sample) and (not selection.steps or sample.step in selection.steps):
            yield sample


def by_reward(samples: Iterable[SampleRecord], count: int, *, best: bool) -> list[SampleRecord]:
    """The best or the worst samples that have a reward; of equal ones those of the latest step
    first. Holds no more than these."""
    sign = -1 if best else 1
    rewarded = (
        (sign * sample.reward, -sample.step, sample)
        for sample in samples
        if sample.reward is not None
    )
    return [sample for *_, sample in nsmallest(count, rewarded, key=lambda ranked: ranked[:2])]


def changed_between(
    samples: Iterable[SampleRecord], selection: SampleSelection
) -> list[tuple[SampleRecord, SampleRecord]]:
    """Responses to one prompt that differ between two steps: the first and the last,
    or the selected ones."""
    ends: dict[tuple[str, str, int], tuple[SampleRecord, SampleRecord]] = {}
    for sample in matching(samples, selection):
        name = sample.phase, str(sample.id), sample.number
        ends[name] = ends.get(name, (sample, sample))[0], sample
    return [
        (before, after)
        for before, after in ends.values()
        if before.step != after.step and before.response != after.response
    ]


def changed_responses(path: Path) -> list[tuple[SampleRecord, SampleRecord]]:
    """The same held-out prompts at the first evaluation and at the last,
    where the responses differ."""
    ends: dict[tuple[str, int], tuple[SampleRecord, SampleRecord]] = {}
    for record in iterate_samples(path) if path.exists() else ():
        if record.phase == "eval":
            name = str(record.id), record.number
            ends[name] = ends.get(name, (record, record))[0], record
    return [(first, last) for first, last in ends.values() if first.response != last.response]
