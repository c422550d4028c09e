"""Tries a reward on rows of a file: what it gives each response, why, and how fast it is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcli import registry
from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import REASONS, REWARDS
from rlcli.errors import DataError, UsageError
from rlcli.inspect.reward_checks import TEXT_KEYS, score_tokens
from rlcli.observe.json_lines import read_json_lines
from rlcli.testing.runner import values_of
from rlcli.testing.subjects import Subject
from rlcli.testing.tokenizer import byte_tokenizer

Row = dict[str, Any]
Rows = Sequence[Row]

AGAIN = 8
"""Responses with which a reward starts its processes, before it is timed."""


@dataclass(frozen=True)
class TriedRow:
    """A response and its reward."""

    line: int
    """Line of the file, from 1."""
    response: str
    answer: str | None
    reward: float
    reason: str | None


@dataclass(frozen=True)
class RewardTrial:
    """The result for all rows."""

    rows: Sequence[TriedRow]
    seconds: float

    @property
    def per_second(self) -> float:
        """Rewards per second, once its processes have been started."""
        return len(self.rows) / max(self.seconds, 1e-9)

    @property
    def mean(self) -> float:
        return sum(row.reward for row in self.rows) / len(self.rows)

    def counts(self) -> dict[float, int]:
        """Reward → how many rows have it, the lowest first."""
        return Counter(sorted(row.reward for row in self.rows))


def try_reward_on(name: str, values: Sequence[str], file: Path) -> RewardTrial:
    """Score the rows of a `.jsonl` file, such as the samples of a run. A row has a `response`, or
    its `answer` is taken as one; its `prompt` and all other fields are given to the reward. A few
    rows are also tried with the response of the next row, and with an empty one. Raises UsageError
    for a reward that needs a model, DataError for rows, whatever the reward raises."""
    subject = Subject("interface", name, registry.path_of("interfaces", name), tuple(values))
    interface = registry.make_interface(ModelInterfaceAbstraction(name, values_of(subject)))
    _check_reads_texts(name, interface)
    rows = _read(file)
    tokenizer = byte_tokenizer()
    _score(interface, tokenizer, rows[:AGAIN])
    if interface.TRIED:
        _demand_numbers(interface, tokenizer, rows)
    began = time.perf_counter()
    rewards, reasons = _score(interface, tokenizer, rows)
    seconds = time.perf_counter() - began
    tried = [
        TriedRow(line, _response(row), _text(row.get("answer")), reward, reason)
        for line, (row, reward, reason) in enumerate(zip(rows, rewards, reasons, strict=True), 1)
    ]
    return RewardTrial(tried, seconds)


def _demand_numbers(interface: ModelInterface, tokenizer: Any, rows: Rows) -> None:
    """Score a few rows with other responses: a model will answer wrongly, or nothing, which needs a
    number too. Raises whatever the reward raises."""
    few, following = rows[:AGAIN], (*rows[1:], rows[0])
    of_the_next = [
        {**row, "response": _response(other)} for row, other in zip(few, following, strict=False)
    ]
    _score(interface, tokenizer, of_the_next, " (its response: that of the next)")
    without = [{**row, "response": ""} for row in few]
    _score(interface, tokenizer, without, " (its response: none)")


def _check_reads_texts(name: str, interface: ModelInterface) -> None:
    read, written = interface.reads("inference"), interface.writes("inference")
    scores = written is not None and REWARDS in written.needed
    if read is None or not scores or not TEXT_KEYS.issuperset(read.needed):
        raise UsageError(
            f"{name} does not score plain texts",
            hint=f"rlcli test interface {name} runs all its checks",
        )


def _read(file: Path) -> list[Row]:
    try:
        rows = list(read_json_lines(file))
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{file}: {reason}", where="--data", code="F31") from None
    if not rows:
        raise DataError(f"{file} has no rows", where="--data", code="F31")
    for line, row in enumerate(rows, start=1):
        if row.get("response") is None and row.get("answer") is None:
            hint = 'a row is {"prompt": …, "response": …, "answer": …}'
            message = "this row has neither a response nor an answer"
            raise DataError(message, where=f"{file}:{line}", hint=hint, code="F31")
    return rows


def _score(
    interface: ModelInterface, tokenizer: Any, rows: Rows, note: str = ""
) -> tuple[list[float], list[str | None]]:
    """Rewards and reasons, one for each row; errors name a row by its line and the note."""
    prompts = [_text(row.get("prompt")) or "" for row in rows]
    asked, answered = (
        tokenizer(texts, add_special_tokens=False).input_ids
        for texts in (prompts, [_response(row) for row in rows])
    )
    fields = {key for row in rows for key in row} - {"prompt", "response", "id"}
    metadata = {key: [row.get(key) for row in rows] for key in sorted(fields)}
    ids = [f"line {line}{note}" for line in range(1, len(rows) + 1)]
    tokens = list(zip(asked, answered, strict=True))
    scored = score_tokens(interface, tokenizer, ids, tokens, metadata)
    reasons = [reason for of_row in scored.metadata.get(REASONS, []) for reason in of_row]
    return scored.data[REWARDS].double().tolist(), reasons or [None] * len(rows)


def _response(row: Row) -> str:
    response = row.get("response")
    return str(row["answer"] if response is None else response)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
