"""The check that rows mean the same in every file format that a dataset reads."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcli.api.data import SequenceSample
from rlcli.testing.contract import Contract, skip_unless
from rlcli.testing.dataset_checks.records import contents
from rlcli.testing.dataset_checks.texts import shown_texts, texts_of, unusual, with_texts
from rlcli.testing.dataset_checks.trial import Row, Rows, Trial, read, without

PROMPT_COLUMN = "prompt_key"
"""The argument that names the column of prompts."""
SAME_ROWS = "read all formats into the same rows, with the same types"
BINARY = (".parquet", ".arrow")
"""Formats that no spreadsheet writes."""


class FormatChecks(Contract):
    def test_formats_mean_the_same(self, trial: Trial) -> None:
        """the same rows as a JSON list, a table of texts or Parquet give the same samples"""
        skip_unless(trial.rows, "has no rows that could be written in another format")
        rows = with_texts(trial.rows, shown_texts(trial, trial.tokenizer), unusual)
        expected = trial.samples(rows)
        for file in _files(trial.folder, rows):
            samples = _samples_if_read(trial, file=file)
            if not samples:  # it does not read this format
                continue
            occasion = f"with its rows in a {file.suffix} file"
            trial.demand_same(expected, samples, occasion, SAME_ROWS, by=contents)
            if file.suffix not in BINARY:  # some spreadsheets begin their files so
                file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
                occasion += " that begins with a byte order mark"
                samples = _samples_if_read(trial, file=file)
                trial.demand_same(expected, samples, occasion, SAME_ROWS, by=contents)

    @pytest.mark.parametrize("blank", [" ", "\n", "\t"], ids=["space", "line break", "tab"])
    def test_prompts_within_answers_mean_the_same(self, trial: Trial, blank: str) -> None:
        """a prompt with which all answers begin, and no column holds, gives the same samples"""
        column = str(getattr(trial.demand(), PROMPT_COLUMN, None))
        rows = [row for row in trial.rows if isinstance(row.get(column), str)]
        skip_unless(rows, "has no prompts in a column")
        apart = [row | _without_prompt(row, column, blank) for row in rows]
        within = [_without_prompt(row, column, row[column] + blank) for row in rows]
        samples = _samples_if_read(trial, rows=within, changes={PROMPT_COLUMN: None})
        skip_unless(samples, "prompts must have a column")
        occasion = f"with answers that begin with the prompt and {blank!r}"
        trial.demand_same(trial.samples(apart), samples, occasion, SAME_ROWS, by=contents)


def _without_prompt(row: Row, prompt: str, start: str) -> Row:
    """A row without its prompt, and with something in front of its other texts."""
    rest = without(row, prompt)
    answers = without(rest, "id")
    texts = [text for value in answers.values() for text in texts_of(value)]
    return rest | with_texts([answers], texts, lambda text: start + text)[0]


def _samples_if_read(trial: Trial, **how: Any) -> list[SequenceSample]:
    """Those of other input; none if the dataset does not take it."""
    try:
        return read(trial.make(**how))
    except Exception:  # whatever a reader of another format raises
        return []


def _files(folder: Path, rows: Rows) -> Iterator[Path]:
    """The rows in a file of each format that can hold them as they are."""
    file = folder / "rows.json"
    file.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    yield file
    if _are_texts_of_same_columns(rows):
        yield _written_table(folder / "rows.csv", rows, ",")
        yield _written_table(folder / "rows.tsv", rows, "\t")
    if (table := _arrow_table(rows)) is not None:
        yield from _written_arrow(folder, table)


def _are_texts_of_same_columns(rows: Rows) -> bool:
    cells = [cell for row in rows for cell in row.values()]
    are_texts = all(isinstance(cell, str) for cell in cells)
    return are_texts and all(list(row) == list(rows[0]) for row in rows)


def _written_table(file: Path, rows: Rows, delimiter: str) -> Path:
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return file


def _arrow_table(rows: Rows) -> Any:
    """The rows as an Arrow table; None if that cannot hold them as they are."""
    import pyarrow

    try:
        table = pyarrow.Table.from_pylist(list(rows))
    except pyarrow.ArrowException:
        return None
    return table if table.to_pylist() == list(rows) else None


def _written_arrow(folder: Path, table: Any) -> Iterator[Path]:
    """Files of a table with a group or batch for each row, as large files have several."""
    from pyarrow import ipc, parquet

    parquet.write_table(table, folder / "rows.parquet", row_group_size=1)
    yield folder / "rows.parquet"
    with ipc.new_file(str(folder / "rows.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    yield folder / "rows.arrow"
