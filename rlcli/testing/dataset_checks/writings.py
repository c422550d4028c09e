"""Checks that what a row says does not depend on how it is written: flags as texts, and contents of
messages in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from rlcli.api.data import SequenceSample
from rlcli.testing.contract import Contract, skip_if, skip_unless
from rlcli.testing.dataset_checks.records import Record
from rlcli.testing.dataset_checks.rendering import is_conversation
from rlcli.testing.dataset_checks.trial import Row, Rows, Trial, needs_template, with_values
from rlcli.testing.tokenizer import byte_tokenizer

WRITTEN = {True: ("true", "True", "1"), False: ("false", "False", "0")}
"""Flags as tables of texts hold them."""


class WritingChecks(Contract):
    def test_flags_may_be_texts(self, trial: Trial) -> None:
        """a flag that is written as a text, as in tables, is that flag, or refused"""
        fields = dict.fromkeys(
            name for row in trial.rows for name, value in row.items() if isinstance(value, bool)
        )
        skip_unless(fields, "has no flags in its rows")
        expected = trial.samples()
        for name in fields:
            for number in range(len(WRITTEN[True])):
                rows = [_with_flag_as_text(row, name, number) for row in trial.rows]
                _demand_same_tokens(trial, rows, expected, f"with {name} as a text")

    def test_contents_may_be_in_parts(self, trial: Trial) -> None:
        """a message whose content is a list of text parts has all of them, or is refused"""
        chat = byte_tokenizer(chat=True)
        rows = next((rows for rows in _with_messages(trial) if trial.accepts(rows, chat)), None)
        if rows is None:
            pytest.skip("its rows hold no messages")
        expected = trial.samples(rows, tokenizer=chat)
        parted = with_values(rows, _in_parts)
        _demand_same_tokens(trial, parted, expected, "with contents in two parts", chat)

    def test_texts_may_be_messages(self, trial: Trial) -> None:
        """prompts and answers that are messages are those texts, or refused"""
        chat = byte_tokenizer(chat=True)
        rows = [row for row in trial.rows if all(map(_has_one_text, row.values()))]
        names = _text_fields(rows)
        skip_if(
            needs_template(trial.cls) or not names or not trial.accepts(rows, chat),
            "has no rows of texts",
        )
        expected = trial.samples(rows, tokenizer=chat)
        for prompt in names:
            answers = dict.fromkeys((name for name in names if name != prompt), "assistant")
            for roles in ({prompt: "user"}, answers, {prompt: "user", **answers}):
                written = [_with_texts_as_messages(row, roles) for row in rows]
                _demand_same_tokens(
                    trial, written, expected, f"with messages as {', '.join(roles)}", chat
                )


def _has_one_text(value: Any) -> bool:
    """Whether it is anything but a list of several texts, or of none."""
    return not isinstance(value, list) or len(value) == 1


def _text_fields(rows: Rows) -> list[str]:
    """Those that are a text, or a list of one text, in each row."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if all(_text_in(row.get(name)) is not None for row in rows)]


def _text_in(value: Any) -> str | None:
    """A text, or the only one of a list."""
    entry = value[0] if isinstance(value, list) and len(value) == 1 else value
    return entry if isinstance(entry, str) else None


def _with_texts_as_messages(row: Row, roles: Mapping[str, str]) -> dict[str, Any]:
    """A row with a list of one message in the place of each of these texts."""
    return {
        **row,
        **{name: [{"role": role, "content": _text_in(row[name])}] for name, role in roles.items()},
    }


def _with_flag_as_text(row: Row, name: str, number: int) -> dict[str, Any]:
    flag = row.get(name)
    return {**row, name: WRITTEN[flag][number]} if isinstance(flag, bool) else row


def _with_messages(trial: Trial) -> Iterator[Rows]:
    """Its rows if they hold messages; or else with one message in the place of each of their
    texts."""
    if any(is_conversation(value) for row in trial.rows for value in row.values()):
        yield trial.rows
        return
    for name in _text_fields(trial.rows):
        yield [_with_texts_as_messages(row, {name: "user"}) for row in trial.rows]


def _in_parts(value: Any) -> Any:
    """A conversation whose contents are lists of two texts; anything else as it is."""
    return [_message_in_parts(entry) for entry in value] if is_conversation(value) else value


def _message_in_parts(message: Row) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or not content:
        return message
    half = len(content) // 2
    parts = [{"type": "text", "text": text} for text in (content[:half], content[half:])]
    return {**message, "content": parts}


def _demand_same_tokens(
    trial: Trial,
    rows: Rows,
    expected: Sequence[SequenceSample],
    occasion: str,
    tokenizer: Any = None,
) -> None:
    """Raise Violation if rows are accepted and their samples hold other numbers."""
    samples = trial.accepted(rows, tokenizer=tokenizer)
    if samples is not None:
        cause = "read it as what it says, or refuse the row"
        trial.demand_same(expected, samples, occasion, cause, trial.reader, by=_numbers)


def _numbers(samples: Iterable[SequenceSample]) -> list[Record]:
    """Everything in them but ids and metadata."""
    encoded = [sample.as_json() for sample in samples]
    return [{**(sample["data"] or {}), "lengths": sample["seqlens"]} for sample in encoded]
