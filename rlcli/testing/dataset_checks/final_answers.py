"""The laws of answers that a dataset takes from the end of a text and puts into its metadata, for a
reward to compare with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlcli.project import is_built_in
from rlcli.testing.contract import Contract, Violation, skip_unless
from rlcli.testing.dataset_checks.trial import Row, Trial

FORMAT = r"[,\s]*"
"""What is not a part of an answer: blanks, and commas in numbers."""
PROBE = "77"
"""An answer that is seen in the metadata of whatever takes answers from ends of texts."""
UNLIKE = (("-3", "3"), ("1.5", "15"), ("2/3", "23"))
"""Pairs of different answers that careless code makes the same."""
LISTS = ("1,2", "12")
"""Likewise; a dataset of the user may hold numbers alone, and take out their commas."""


@dataclass(frozen=True)
class FinalAnswer:
    """An answer at the end of a text."""

    row: Row
    field: str
    """The field of the text."""
    before: str
    """The text up to the answer."""
    name: str
    """That of the answer in the metadata."""
    value: str

    def read(self, trial: Trial, text: str) -> Any:
        """What the metadata hold for another text; None if it is refused."""
        samples = trial.accepted([{**self.row, self.field: text}])
        return samples[0].metadata[self.name][0] if samples else None


class FinalAnswerChecks(Contract):
    def test_final_answers(self, trial: Trial) -> None:
        """of a text that ends with the answer nothing else counts, and different answers differ"""
        answers = list(_final_answers(trial))
        skip_unless(answers, "takes no answer from the end of a text")
        pairs = (*UNLIKE, LISTS) if is_built_in(trial.signature.path) else UNLIKE
        for answer in answers:
            for earlier in answers:
                _demand_same_after(trial, answer, earlier)
            for pair in pairs:
                _demand_different(trial, answer, pair)


def _demand_same_after(trial: Trial, answer: FinalAnswer, earlier: FinalAnswer) -> None:
    """Raise Violation if another row's text in front of that of an answer changes it."""
    text = f"{earlier.row[answer.field]}\n{answer.row[answer.field]}"
    value = answer.read(trial, text)
    if value not in (None, answer.value):
        raise Violation(
            f"{answer.name} is {answer.value!r:.40} of a row, and {value!r:.40} when its "
            f"{answer.field} is {text!r:.80}",
            "take what is behind the last mark, not the first",
            trial.reader,
        )


def _demand_different(trial: Trial, answer: FinalAnswer, pair: tuple[str, str]) -> None:
    """Raise Violation if two different answers become the same."""
    first, second = (answer.read(trial, answer.before + ending) for ending in pair)
    if first is not None and first == second:
        raise Violation(
            f"{answer.name} is {first!r:.40} of both {pair[0]!r} and {pair[1]!r}",
            "of an answer, take out commas between groups of three digits alone",
            trial.reader,
        )


def _final_answers(trial: Trial) -> Iterator[FinalAnswer]:
    """The answers in the metadata of rows that are ends of longer texts, and follow them."""
    samples = trial.samples() if trial.rows else []
    for row, sample in zip(trial.rows, samples, strict=False):
        for name, (value, *_) in sample.metadata.items():
            for field, text in row.items():
                before = _before(text, value)
                answer = FinalAnswer(row, field, before, name, value)
                if before and answer.read(trial, before + PROBE) == PROBE:
                    yield answer


def _before(text: Any, ending: Any) -> str:
    """A text without the answer that it ends with; empty if it does not, or is nothing else."""
    if not isinstance(text, str) or not isinstance(ending, str) or not ending:
        return ""
    characters = [re.escape(character) for character in re.sub(FORMAT, "", ending)]
    match = re.fullmatch(f"(.*?)({FORMAT.join(characters)}){FORMAT}", text, flags=re.DOTALL)
    return match[1] if match and match[1].strip() else ""
