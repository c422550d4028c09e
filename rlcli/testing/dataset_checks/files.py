"""Checks of a dataset that reads a file: malformed rows, over-long rows,
and the user's own file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from rlcli.api.data import SequenceSample
from rlcli.errors import RlcliError
from rlcli.testing.contract import Contract, Violation, place_of, skip_if, skip_unless
from rlcli.testing.dataset_checks.records import id_of
from rlcli.testing.dataset_checks.sequences import sequences_of
from rlcli.testing.dataset_checks.texts import texts_of
from rlcli.testing.dataset_checks.trial import (
    Line,
    Row,
    Trial,
    as_line,
    longest_sequence,
    read,
    refusal,
    without,
)

SAY_WHERE = (
    'raise DataError("what is wrong", where=f"{path}:{line}"); read_rows does so for every BadRow'
)
WRONG_TYPES: tuple[Any, ...] = (None, 7, "", [], ["x"], {"x": 1})


class FileChecks(Contract):
    """Checks of how the rows of a file are handled."""

    def test_malformed_rows(self, trial: Trial) -> None:
        """a malformed row is refused with its file and line"""
        for fault, line in _malformed(trial.rows_or_skip()):
            error = _planted(trial, line)
            if error is None:
                raise Violation(
                    f"a row that is {fault} is accepted as if it were good: {line!r:.60}",
                    SAY_WHERE,
                    trial.location,
                )
            _demand_place(trial, error, f"a row that is {fault}")

    def test_odd_fields(self, trial: Trial) -> None:
        """fields missing or of a wrong type never just crash"""
        row = trial.rows_or_skip()[0]
        for field in row:
            faulty = {f"without {field!r}": without(row, field)} | {
                f"with {value!r} as {field!r}": {**row, field: value} for value in WRONG_TYPES
            }
            for fault, changed in faulty.items():
                error = _planted(trial, as_line(changed))
                if error is not None:
                    _demand_place(trial, error, f"a row {fault}")

    def test_skipped_rows(self, trial: Trial) -> None:
        """skipping malformed rows leaves the others alone"""
        lines = [as_line(row) for row in trial.rows_or_skip()]
        skip_unless(trial.takes("bad_rows"), "has no bad_rows")
        skip_if(trial.divides_rows, "not tried: a row may become several samples")
        all_rows = trial.samples()
        dataset = trial.demand(lines=[lines[0], "{", *lines[2:]], bad_rows="skip")
        trial.demand_same(
            [all_rows[0], *all_rows[2:]],
            read(dataset),
            "with a malformed row skipped",
            "skip only that row; number rows by their lines",
        )
        bad_rows = list(dataset.survey().bad_rows) if hasattr(dataset, "survey") else None
        reported = f"{trial.file}:2"
        if bad_rows is not None and [bad.split(": ")[0] for bad in bad_rows] != [reported]:
            raise Violation(
                f"the survey reports the bad rows {bad_rows}, not of {reported}",
                "note every row that is skipped, with its file and line",
                place_of(type(dataset).survey),
            )

    def test_max_rows(self, trial: Trial) -> None:
        """max_rows: N reads the first N rows"""
        skip_if(not trial.takes("max_rows") or not trial.rows, "has no max_rows")
        all_rows = trial.samples()
        for count in range(1, len(trial.rows if trial.divides_rows else all_rows) + 1):
            first_rows = trial.samples(max_rows=count)
            first = all_rows[: len(first_rows) if trial.divides_rows else count]
            trial.demand_same(
                first, first_rows, f"with max_rows = {count}", "stop after that many rows"
            )

    def test_overlong_refused(self, trial: Trial) -> None:
        """a row beyond max_length is refused with its line"""
        limit, longest = _limit(trial)
        try:
            rows = read(trial.make(max_length=limit))
        except RlcliError as error:
            _demand_place(
                trial, error, f"a row of {limit + 1} tokens under max_length = {limit}", longest + 1
            )
            return
        long = max(longest_sequence(sample) for sample in rows)
        if long > limit:
            raise Violation(
                f"a row has {long} tokens, max_length is {limit}",
                "count prompt, answer and EOS together, and refuse, drop or cut what is longer",
                trial.location,
            )

    def test_overlong_dropped(self, trial: Trial) -> None:
        """overlong: drop removes only the long rows"""
        limit, _ = _limit(trial)
        expected = [sample for sample in trial.samples() if longest_sequence(sample) <= limit]
        dataset = _make_overlong(trial, "drop", limit)
        cause = "drop only what is longer than max_length"
        trial.demand_same(expected, read(dataset), f"under max_length = {limit}", cause)
        dropped = len(trial.rows) - len(expected)
        if hasattr(dataset, "survey") and dataset.survey().too_long != dropped:
            raise Violation(
                f"the survey counts {dataset.survey().too_long} long rows of {dropped}",
                "survey all rows, before any is dropped",
                place_of(type(dataset).survey),
            )

    @pytest.mark.parametrize("side", ["truncate_left", "truncate_right"])
    def test_overlong_cut(self, trial: Trial, side: str) -> None:
        """overlong rows are cut on the requested side"""
        limit, _ = _limit(trial)
        uncut, cut = trial.samples(), read(_make_overlong(trial, side, limit))
        if len(cut) != len(uncut):
            raise Violation(
                f"of {len(uncut)} rows {len(cut)} are left", "cut the long ones", trial.location
            )
        for index, (before, after) in enumerate(zip(uncut, cut, strict=True)):
            mismatch = _wrong_cut(before, after, side, limit)
            if mismatch:
                raise Violation(
                    f"row {index}: {mismatch}",
                    (
                        "truncate_left takes tokens from the prompt's start, truncate_right from "
                        "the end; cut tokens and mask alike"
                    ),
                    trial.location,
                )

    def test_own_file(self, trial: Trial) -> None:
        """every row of the given file can be used"""
        if trial.given_file is None:
            pytest.skip(f"no {trial.file_argument or 'path'}=FILE given")
        dataset = trial.make_of_whole_file()
        use = dataset.preview if hasattr(dataset, "preview") else dataset.__getitem__
        for index in range(len(dataset)):
            use(index)


def _malformed(rows: list[Row]) -> Iterator[tuple[str, Line]]:
    """(description, a line of the file) for each way not to be a row at all."""
    good = as_line(rows[0])
    yield "cut off", good[: len(good) // 2]
    yield "not JSON", "not a row"
    yield "a list", f"[{good}]"
    yield "a text", '"a text"'
    yield "an object without fields", "{}"
    yield "an object with null in every field", as_line(dict.fromkeys(rows[0]))
    texts = [json.dumps(text, ensure_ascii=False) for text in texts_of([*rows[0].values()])]
    if texts:
        yield "not UTF-8", good.encode().replace(texts[0].encode(), b'"\xff"', 1)


def _planted(trial: Trial, line: Line) -> Exception | None:
    """The exception the dataset raises with this line third in its file,
    after a row and an empty line."""
    lines = [as_line(row) for row in trial.rows]
    try:
        read(trial.make(lines=[lines[0], "", line, *lines[1:]]))
    except Exception as error:  # a user's dataset may raise anything
        return error
    return None


def _demand_place(trial: Trial, error: Exception, subject: str, line: int = 3) -> None:
    """Raise Violation unless the error is ours and gives this line of the file."""
    location = re.compile(rf"{re.escape(str(trial.file))}:{line}(?!\d)")
    if not isinstance(error, RlcliError) or not location.search(f"{error.where} {error}"):
        raise Violation(
            f"{subject}, in line {line}, ends in {refusal(error)!s:.150}, without "
            f"{trial.file.name}:{line}",
            SAY_WHERE,
            trial.place_in(error),
        ) from error


def _limit(trial: Trial) -> tuple[int, int]:
    """(a limit that only the longest row exceeds, the index of that row)."""
    skip_unless(trial.takes("max_length"), "has no max_length")
    trial.rows_or_skip()
    lengths = [longest_sequence(sample) for sample in trial.samples()]
    longest = max(lengths)
    skip_if(len(lengths) < 2 or lengths.count(longest) > 1, "not tried: no row is the longest")
    return longest - 1, lengths.index(longest)


def _make_overlong(trial: Trial, overlong: str, limit: int) -> Any:
    skip_unless(trial.takes("overlong"), "has no overlong")
    return trial.demand(max_length=limit, overlong=overlong)


def _wrong_cut(before: SequenceSample, after: SequenceSample, side: str, limit: int) -> str:
    """What is wrong with a row that was cut on one side; empty if nothing is."""
    if id_of(before) != id_of(after):
        return f"its id was {id_of(before)!r} and is {id_of(after)!r}"
    for uncut, cut in zip(sequences_of(before), sequences_of(after), strict=False):
        count = len(cut.tokens)
        is_end = side == "truncate_left"
        left = slice(len(uncut.tokens) - count, None) if is_end else slice(count)
        if (uncut.tokens[left], uncut.trained[left]) != (cut.tokens, cut.trained):
            return f"what {side} leaves is not the {'end' if is_end else 'start'} with its mask"
    length, room = longest_sequence(after), min(longest_sequence(before), limit)
    return "" if length == room else f"{length} tokens are left where {room} have room"
