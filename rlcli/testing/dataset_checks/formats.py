"""The check that rows mean the same in every file format that a dataset reads."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcli.testing.contract import Contract, Violation
from rlcli.testing.dataset_checks.samples import shown_texts, unusual, with_texts
from rlcli.testing.dataset_checks.trial import Trial, content_of, read

Rows = Sequence[dict[str, Any]]


class FormatChecks(Contract):
    def test_formats_mean_the_same(self, trial: Trial) -> None:
        """the same rows as a JSON list, a table of texts or Parquet give the same samples"""
        if not trial.rows:
            pytest.skip("has no rows that could be written in another format")
        rows = with_texts(trial.rows, shown_texts(trial, trial.tokenizer), unusual)
        expected = [content_of(sample) for sample in read(trial.demand(rows))]
        for suffix, write in WRITERS.items():
            file = trial.folder / f"rows{suffix}"
            if not write(file, rows):
                continue
            contents = _contents(trial, file)
            if not contents:  # it does not read this format
                continue
            _compare(trial, expected, contents, f"a {suffix} file")
            if suffix not in TABLES:  # some spreadsheets begin their files so
                file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
                marked = f"a {suffix} file that begins with a byte order mark"
                _compare(trial, expected, _contents(trial, file), marked)


def _contents(trial: Trial, file: Path) -> list[dict[str, Any]]:
    """Those of the samples; none if the dataset does not take the file."""
    try:
        return [content_of(sample) for sample in read(trial.make(file=file))]
    except Exception:  # whatever a reader of another format raises
        return []


def _compare(
    trial: Trial, expected: list[dict[str, Any]], contents: list[dict[str, Any]], file: str
) -> None:
    if contents != expected:
        raise Violation(
            f"{_first_difference(expected, contents)} if its rows are in {file}",
            "read all formats into the same rows, with the same types",
            trial.location,
        )


def _first_difference(expected: list[dict[str, Any]], contents: list[dict[str, Any]]) -> str:
    if len(contents) != len(expected):
        return f"it has {len(contents)} rows and not {len(expected)}"
    unequal = (
        f"{name} of row {index} is {str(content.get(name))[:40]} and not {str(value)[:40]}"
        for index, (row, content) in enumerate(zip(expected, contents, strict=True))
        for name, value in row.items()
        if content.get(name) != value
    )
    return next(unequal, "a row has more")


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

    table = _table(rows)
    if table is not None:
        parquet.write_table(table, file, row_group_size=1)
    return table is not None


def _write_arrow(file: Path, rows: Rows) -> bool:
    """In a batch for each row; returns as `_write_parquet`."""
    from pyarrow import ipc

    table = _table(rows)
    if table is not None:
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
