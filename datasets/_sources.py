"""Sources of rows: JSON and CSV files, the formats of Hugging Face's `datasets`, and the Hub."""

from __future__ import annotations

import csv
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from rlcli.api.quiet_logs import quiet
from rlcli.errors import DataError, first_line
from rlcli.files import LFS_FETCH, is_lfs_pointer, open_regular

from ._jsonl import HUB, MAX_ROW, BadRow, Parsed, checked_row, json_rows

SPLIT = "train"
"""The split that is read if no other is named; rows that are not split are this one."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLES = (".parquet", ".arrow")
JSON = "extension<arrow.json>"
"""How the type of Arrow's that holds JSON is written."""
OFFLINE = (
    "the Hub must be reachable or the dataset in its cache; a copy works too: --data FILE.jsonl"
)
"""The hint for a dataset of the Hub that cannot be read."""
FORMATS = (".jsonl", ".json", *DELIMITERS, *TABLES)
READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"} | {
    ending: ending[1:] for ending in TABLES
}
"""Ending → the library's reader of such files; it reads a folder with a single one."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
"""Files next to rows that describe them."""
SHOWN = 5
"""Files without effect that are named."""
BATCH = 1024
"""Rows of a table held in memory at once."""


Setting = Callable[[str, str], str]


@dataclass(frozen=True)
class RowSource:
    """A source of rows."""

    path: str
    """A file, a folder, or `hf:NAME`."""
    split: str = SPLIT
    config: str | None = None
    streaming: bool = False
    setting: Setting = "{}={}".format
    """How an argument is set on the command line, for hints."""
    note: Callable[[str], object] = str
    """Is called with what a user should know of the files."""

    def rows(self) -> Iterator[Parsed]:
        """(number of the row, its line, its content or fault), both counted from 1; in formats
        without lines, rows are counted. Raises DataError."""
        file = Path(self.path).expanduser()
        if self.path.startswith(HUB):
            return _numbered(self._of_hub())
        if file.is_dir():
            return _numbered(self._of_folder(file))
        if self.split != SPLIT and file.exists():
            hint = "leave split out, and name the file with these rows in path"
            raise DataError(f"{file} is one file: it has no split {self.split}", hint=hint)
        if is_lfs_pointer(file):
            raise _not_fetched(file)
        ending = file.suffix.lower()
        if ending in DELIMITERS:
            return _csv_rows(file, DELIMITERS[ending])
        if ending in TABLES:
            return _numbered(_table_rows(file))
        _refuse_compressed(file)
        return json_rows(file)

    def _of_hub(self) -> Iterator[Any]:
        name = self.path.removeprefix(HUB)
        try:
            from datasets import load_dataset

            with quiet("huggingface_hub"), _offline_without_network():
                rows = load_dataset(name, self.config, split=self.split, streaming=self.streaming)
            yield from _of_library(rows)
        except (
            Exception
        ) as error:  # the network, the Hub and its files make the library raise all kinds
            message = f"cannot read {name} from the Hub: {_reason(error)}"
            hint = _choice(str(error), self.setting) or OFFLINE
            raise DataError(message, hint=hint, code="F81") from error

    def _of_folder(self, folder: Path) -> Iterator[Any]:
        _refuse_without_rows(folder)
        try:
            yield from self._opened(folder)
        except Exception as error:  # broken files make the library raise all kinds
            raise _unreadable(folder, error, self.setting) from error

    def _opened(self, folder: Path) -> Iterator[Any]:
        """The rows of a dataset that the library has saved, or of the files in a folder."""
        from datasets import disable_progress_bars, load_dataset, load_from_disk

        disable_progress_bars()
        if (folder / "dataset_dict.json").is_file():
            splits = {name: _of_library(rows) for name, rows in load_from_disk(str(folder)).items()}
            if self.split not in splits:
                raise ValueError(f"it has no split {self.split}, but {', '.join(splits)}")
            yield from splits[self.split]
            return
        if (folder / "state.json").is_file():
            rows = load_from_disk(str(folder))
            if self.split not in (SPLIT, str(rows.split)):
                raise ValueError(f"it has no split {self.split}, but one without a name")
        else:
            rows = load_dataset(
                str(folder), self.config, split=self.split, streaming=self.streaming
            )
            if (info := getattr(rows, "info", None)) is not None:
                self._note_other_formats(folder, info.builder_name)
        yield from _of_library(rows)

    def _note_other_formats(self, folder: Path, reader: str) -> None:
        """Files with rows that are not read, because those of another format are."""
        others = [
            file.name
            for file in sorted(folder.rglob("[!._]*"))
            if _reader_of(file) not in (None, reader)
        ]
        if others:
            shown = ", ".join(others[:SHOWN]) + (", …" if others[SHOWN:] else "")
            self.note(f"of {folder} only {reader} files are read, not {shown}")


def _not_fetched(file: Path) -> DataError:
    message = f"{file} is a pointer of Git LFS, not the file itself"
    return DataError(message, hint=LFS_FETCH, code="F82")


def _unreadable(folder: Path, error: Exception, setting: Setting) -> DataError:
    for file in filter(is_lfs_pointer, folder.rglob("*")):
        return _not_fetched(file)
    hint = _choice(str(error), setting)
    return DataError(f"cannot read {folder}: {_reason(error)}", hint=hint, code="F82")


def _choice(message: str, setting: Setting) -> str | None:
    """The hint for a missing or wrong name of a part of a dataset, where the library lists them:
    `Unknown split "train". Should be one of ['test'].`"""
    listed = re.search(r"(config|split).*?\[(.*?)\]", message, re.IGNORECASE | re.DOTALL)
    names = re.findall(r"['\"](.+?)['\"]", listed[2]) if listed else []
    if not listed or not names:
        return None
    return f"choose one of {', '.join(names)}: {setting(listed[1].lower(), names[0])}"


def _reason(error: BaseException) -> str:
    """Why the library cannot read rows; its error for a file only says that they are not
    generated, and what it was caused by says why."""
    from datasets.exceptions import DatasetGenerationError
    from datasets.table import CastError

    while isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CastError):
        return f"its files do not have the same columns: {error.details()}"
    return first_line(error)


def _refuse_compressed(file: Path) -> None:
    """Raise DataError for a file that only the library reads, within a folder."""
    if file.suffix.lower() in COMPRESSED and file.is_file():
        hint = "decompress it, or name a folder that holds it: files of a folder may be compressed"
        raise DataError(f"{file} is compressed", hint=hint, code="F82")


def _reader_of(file: Path) -> str | None:
    """The library's reader of a file, None for one without rows."""
    if file.name in DESCRIPTIONS:
        return None
    name = file.with_suffix("") if file.suffix in COMPRESSED else file
    return READERS.get(name.suffix)


def _refuse_without_rows(folder: Path) -> None:
    """Raise DataError for a folder that has no file of rows. Compressed files may hold some."""
    endings = {file.suffix for file in folder.rglob("*") if file.is_file()}
    if endings <= {"", ".txt", ".md"}:
        texts = " but .txt files, which have no fields" if ".txt" in endings else ""
        hint = f"rows are read from files that end with {', '.join(FORMATS)}"
        raise DataError(f"{folder} holds no rows{texts}", hint=hint, code="F80")


def _table_rows(file: Path) -> Iterator[Any]:
    """Rows of Apache formats, one batch at a time, read with the library that `datasets` uses."""
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        with os.fdopen(open_regular(file), "rb") as opened:
            if file.suffix.lower() == ".parquet":
                batches = parquet.ParquetFile(opened).iter_batches(BATCH)
            else:
                batches = _arrow_batches(ipc, opened)
            for batch in batches:
                yield from _as_written(batch.to_pylist(), batch.schema, are_encoded=True)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {first_line(error)}", code="F82") from error


def _arrow_batches(ipc: Any, opened: Any) -> Iterator[Any]:
    """Batches of a stream, as `datasets` writes it, or of a file."""
    is_file = opened.read(6) == b"ARROW1"
    opened.seek(0)
    if not is_file:
        yield from ipc.open_stream(opened)
        return
    reader = ipc.open_file(opened)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _of_library(rows: Iterable[Any]) -> Iterator[Any]:
    """Rows of a dataset of the library, which decodes JSON itself."""
    features = getattr(rows, "features", None)  # a stream may not know them
    return _as_written(rows, features.arrow_schema if features else (), are_encoded=False)


def _as_written(rows: Iterable[Any], schema: Any, *, are_encoded: bool) -> Iterator[Any]:
    """Rows as their author wrote them: in Arrow all objects of a column have the same fields, and
    null in those that they did not have. `are_encoded`: whether JSON, a type of Arrow's, is
    still text."""
    kinds = {column.name: column.type for column in schema}
    for row in rows:
        yield {name: _value(value, kinds.get(name), are_encoded) for name, value in row.items()}


def _value(value: Any, kind: Any, is_encoded: bool) -> Any:
    """A value of an Arrow type, None if that is not known, without the nulls in its objects. Those
    in JSON are its author's."""
    if hasattr(kind, "storage_type"):  # an extension
        is_text = is_encoded and isinstance(value, str) and str(kind) == JSON
        return json.loads(value) if is_text else value
    if isinstance(value, list):
        kind = getattr(kind, "value_type", None)
        return [_value(entry, kind, is_encoded) for entry in value]
    if isinstance(value, dict):
        kinds = {} if kind is None else {field.name: field.type for field in kind}
        return {
            name: _value(entry, kinds.get(name), is_encoded)
            for name, entry in value.items()
            if entry is not None
        }
    return value


@contextmanager
def _offline_without_network() -> Iterator[None]:
    """If neither this machine nor a proxy can resolve the Hub's address, have the library use its
    cache at once, instead of after five failed attempts."""
    import datasets
    from huggingface_hub import constants

    try:
        is_known = bool(getproxies()) or bool(
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
        )
    except OSError:
        is_known = False
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if not is_known:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _numbered(rows: Iterable[Any]) -> Iterator[Parsed]:
    for number, row in enumerate(rows, start=1):
        yield number, number, checked_row(row)


def _csv_rows(file: Path, delimiter: str) -> Iterator[Parsed]:
    """Every cell is text. A row's line is its first."""
    number, line = 0, 1
    csv.field_size_limit(MAX_ROW)  # of the process; the library's own would refuse long documents
    try:
        with os.fdopen(open_regular(file), "r", encoding="utf-8-sig", newline="") as opened:
            reader = csv.reader(opened, delimiter=delimiter, strict=True)
            names = next(reader, [])
            if len(set(names)) < len(names):
                raise DataError("two columns have one name", where=f"{file}:1", code="F82")
            line = reader.line_num + 1
            for cells in reader:
                if cells:
                    number += 1
                    yield number, line, _named(names, cells)
                line = reader.line_num + 1
    except (UnicodeDecodeError, csv.Error) as error:
        message = "not UTF-8" if isinstance(error, UnicodeDecodeError) else f"not CSV: {error}"
        raise DataError(message, where=f"{file}:{line}", code="F82") from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or type(error).__name__}") from error


def _named(names: list[str], cells: list[str]) -> dict[str, Any] | BadRow:
    if len(cells) != len(names):
        return BadRow(f"{len(cells)} cells under {len(names)} columns")
    return dict(zip(names, cells, strict=True))
