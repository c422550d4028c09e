"""What the model was asked and said, and what it got for it: samples.jsonl."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlcli.errors import DataError, escape_control
from rlcli.observe.json_lines import JsonLines, Warn, is_nonfinite, plain_number, read_json_lines

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """One prompt with one response. The texts are data of the model: print them through `escape_control`."""

    step: int
    id: str | int
    """Of the dataset row."""
    prompt: str
    response: str
    reward: float | None = None
    answer: str | None = None
    """The ground truth, if the dataset has one."""
    phase: str = "train"
    """train or eval."""
    number: int = 0
    """Which of the responses to this prompt, from 0."""
    finish: str | None = None
    """stop: the response ended by itself; length: it was cut off. None where nobody knows."""
    logprob: float | None = None
    """Sum of the log-probs with which its tokens were sampled, in nats."""


class SampleWriter:
    """Appends to samples.jsonl."""

    def __init__(self, path: Path, warn: Warn = log.warning):
        self.lines = JsonLines(path, warn)

    def write(self, sample: SampleRecord) -> None:
        fields: dict[str, Any] = {key: plain_number(value) for key, value in asdict(sample).items()}
        for name in ("reward", "logprob"):
            fields[name] = None if is_nonfinite(fields[name]) else fields[name]
        self.lines.write(fields)

    def close(self) -> None:
        self.lines.close()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_samples(path: Path) -> list[SampleRecord]:
    """The samples of a file, in order. Raises DataError for a line that is none."""
    records = []
    for fields in read_json_lines(path):
        try:
            records.append(SampleRecord(**fields))
        except TypeError as error:
            raise DataError(
                f"a line is not a sample: {escape_control(str(error))}", where=str(path), code="F31"
            ) from None
    return records


def changed_responses(path: Path) -> list[tuple[SampleRecord, SampleRecord]]:
    """The same held-out prompts at the first evaluation and at the last, where the responses differ."""
    evaluations: dict[int, list[SampleRecord]] = {}
    for record in read_samples(path) if path.exists() else ():
        if record.phase == "eval":
            evaluations.setdefault(record.step, []).append(record)
    if len(evaluations) < 2:
        return []
    first, last = evaluations[min(evaluations)], evaluations[max(evaluations)]
    return [(a, b) for a, b in zip(first, last, strict=False) if a.response != b.response]
