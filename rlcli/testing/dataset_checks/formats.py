"""The check that rows mean the same in every file format that a dataset reads."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcli.testing.contract import Contract, Violation, skip_unless
from rlcli.testing.dataset_checks.samples import shown_texts, texts_of, unusual, with_texts
from rlcli.testing.dataset_checks.trial import (
    Record,
    Row,
    Rows,
    Trial,
    contents,
    first_difference,
    read,
)

PROMPT_COLUMN = "prompt_key"
"""The argument that names the column of prompts."""


class FormatChecks(Contract):
    def test_formats_mean_the_same(self, trial: Trial) -> None:
        """the same rows as a JSON list, a table of texts or Parquet give the same samples"""
        skip_unless(trial.rows, "has no rows that could be written in another format")
        rows = with_texts(trial.rows, shown_texts(trial, trial.tokenizer), unusual)
        expected = contents(trial.samples(rows))
        for suffix, write in WRITERS.items():
            file = trial.folder / f"rows{suffix}"
            if not write(file, rows):
                continue
            of_file = _contents(trial, file)
            if not of_file:  # it does not read this format
                continue
            _compare(trial, expected, of_file, f"with its rows in a {suffix} file")
            if suffix not in TABLES:  # some spreadsheets begin their files so
                file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
                marked = f"with its rows in a {suffix} file that begins with a byte order mark"
                _compare(trial, expected, _contents(trial, file), marked)

    @pytest.mark.parametrize("blank", [" ", "\n", "\t"], ids=["space", "line break", "tab"])
    def test_prompts_within_answers_mean_the_same(self, trial: Trial, blank: str) -> None:
        """a prompt with which all answers begin, and no column holds, gives the same samples"""
        column = str(getattr(trial.demand(), PROMPT_COLUMN, None))
        rows = [row for row in trial.rows if isinstance(row.get(column), str)]
        skip_unless(rows, "has no prompts in a column")
        apart = [_with_answers(row, column, blank) for row in rows]
        within = [_with_answers(row, column, row[column] + blank) for row in rows]
        for row in within:
            del row[column]
        try:
            samples = read(trial.make(within, changes={PROMPT_COLUMN: None}))
        except Exception:
            pytest.skip("prompts must have a column")
        expected = contents(trial.samples(apart))
        occasion = f"with answers that begin with the prompt and {blank!r}"
        _compare(trial, expected, contents(samples), occasion)


def _with_answers(row: Row, prompt: str, start: str) -> dict[str, Any]:
    """A row with something in front of its texts, except the prompt."""
    answers = {name: value for name, value in row.items() if name not in (prompt, "id")}
    texts = [text for value in answers.values() for text in texts_of(value)]
    return row | with_texts([answers], texts, lambda text: start + text)[0]


def _contents(trial: Trial, file: Path) -> list[Record]:
    """Those of the samples; none if the dataset does not take the file."""
    try:
        return contents(read(trial.make(file=file)))
    except Exception:  # whatever a reader of another format raises
        return []


def _compare(trial: Trial, expected: list[Record], of_file: list[Record], occasion: str) -> None:
    if mismatch := first_difference(expected, of_file):
        raise Violation(
            f"{occasion}, {mismatch}",
            "read all formats into the same rows, with the same types",
            trial.location,
        )


def _write_list(file: Path, rows: Rows) -> bool:
    file.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return True


def _table_writer(delimiter: str) -> Callable[[Path, Rows], bool]:
    def write(file: Path, rows: Rows) -> bool:
        """Returns False for rows that are not made of the same texts alone."""
        names = list(rows[0])
        cells = [cell for row in rows for cell in row.values()]
        are_texts = all(isinstance(cell, str) for cell in cells)
        is_table = are_texts and all(list(row) == names for row in rows)
        if is_table:
            with file.open("w", encoding="utf-8", newline="") as opened:
                writer = csv.DictWriter(opened, names, delimiter=delimiter)
                writer.writeheader()
                writer.writerows(rows)
        return is_table

    return write


def _write_parquet(file: Path, rows: Rows) -> bool:
    """In a group for each row, as large files have several. Returns False for rows whose columns
    have several types."""
    from pyarrow import parquet

    if (table := _table(rows)) is not None:
        parquet.write_table(table, file, row_group_size=1)
    return table is not None


def _write_arrow(file: Path, rows: Rows) -> bool:
    """In a batch for each row; returns as `_write_parquet`."""
    from pyarrow import ipc

    if (table := _table(rows)) is not None:
        with ipc.new_file(str(file), table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    return table is not None


def _table(rows: Rows) -> Any:
    """The rows as an Arrow table; None if that cannot hold them as they are."""
    import pyarrow

    try:
        table = pyarrow.Table.from_pylist(list(rows))
    except pyarrow.ArrowException:
        return None
    return table if table.to_pylist() == list(rows) else None


WRITERS: dict[str, Callable[[Path, Rows], bool]] = {
    ".json": _write_list,
    ".csv": _table_writer(","),
    ".tsv": _table_writer("\t"),
    ".parquet": _write_parquet,
    ".arrow": _write_arrow,
}
"""Suffix → writes the rows, and says whether the format can hold them."""
TABLES = (".parquet", ".arrow")
"""Formats that no spreadsheet writes."""
