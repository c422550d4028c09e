"""Strict reading of rows: every fault is reported with its file and line. jsonl files and JSON
lists are read here, other formats in `_sources`."""

from __future__ import annotations

import codecs
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, TypeVar

from rlcli.errors import DataError
from rlcli.files import open_regular, read_regular

from ._layouts import columns_of_row

logger = logging.getLogger("rlcli.datasets")

T = TypeVar("T")

BadRows = Literal["error", "skip"]

HUB = "hf:"
"""Prefix of the path of a Hub dataset."""
NOT_TEXT = (
    "rows are JSON objects, one on each line, as in .jsonl files; a text is a field of one: "
    '{"text": "…"}'
)
MAX_ROW = 8 << 20
"""Most bytes in a line. About the longest context of today's models."""
MAX_LIST = 128 << 20
"""Most bytes in a JSON list, which must fit into memory as a whole; lines need not."""


class BadRow(ValueError):
    """A fault in one row; `code` is its id in the fault catalogue, `hint` a way to fix it."""

    def __init__(self, problem: str, code: str = "F31", hint: str | None = None):
        super().__init__(problem)
        self.code = code
        self.hint = hint


class MissingField(BadRow):
    """A row lacks a field."""

    def __init__(self, key: str, fields: dict[str, Any]):
        self.key, self.columns = key, columns_of_row(fields)
        super().__init__(f"there is no field {key!r}; the row has {sorted(self.columns)}")


Parsed = tuple[int, int, dict[str, Any] | BadRow]
"""The number of a row, its line, and its content or fault."""
Fault = tuple[int, BadRow]
"""The line of a bad row, and what is wrong with it."""


@dataclass(frozen=True)
class Row(Generic[T]):
    """One row, parsed and checked."""

    id: str
    """Its own `id` if every row has one, else `<file>:<line>` (in a JSON list:
    `<file>:<place>`, from 1)."""
    where: str
    """`path:line`, for messages."""
    content: T


def read_rows(
    path: str,
    read: Callable[[dict[str, Any]], T],
    *,
    bad_rows: BadRows = "error",
    max_bad_rows: int = 10,
    skipped: int = 0,
    max_rows: int | None = None,
    note: Callable[[str], None] | None = None,
    parsed_rows: Iterable[Parsed] | None = None,
    may_be_empty: bool = False,
) -> list[Row[T]]:
    """The rows of a file as `read` makes them; `read` raises BadRow for a row it cannot use.
    `parsed_rows`: the content of `path`, unless it is a JSON file.

    `bad_rows="skip"` skips up to `max_bad_rows` of them, including those `skipped` in earlier parts
    of the file, and reports each to `note`; the other rows keep their ids. At most `max_rows` good
    rows are read. Raises DataError, also for duplicate ids and, unless it `may_be_empty`, for a
    file without rows; the error for a bad row lists the lines of the others.
    """
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}; it must be at least 1")
    file = Path(path).expanduser()
    every = parsed_rows if parsed_rows is not None else json_rows(file)
    good, bad = _good_and_bad(every, read, max_rows)
    if bad and bad_rows == "error":
        raise _error_of(path, bad)
    if bad:
        _refuse_too_many(path, bad, max_bad_rows, skipped)
    if not good and not may_be_empty:
        raise DataError(f"{path} holds no rows: {_why_none(path, bad)}", code="F80")
    if note is not None:
        for line, problem in bad:
            note(f"{path}:{line}: {problem}")
    rows = _with_ids(good, path, file.stem.removeprefix(HUB))
    _refuse_duplicates(rows)
    return rows


def _good_and_bad(
    parsed_rows: Iterable[Parsed], read: Callable[[dict[str, Any]], T], max_rows: int | None
) -> tuple[list[tuple[int, int, Any, T]], list[Fault]]:
    """(number, line, `id` field, content) of rows that can be used, and (line, fault) of others."""
    good: list[tuple[int, int, Any, T]] = []
    bad: list[Fault] = []
    for number, line, parsed in parsed_rows:
        if max_rows is not None and len(good) >= max_rows:
            break
        try:
            if isinstance(parsed, BadRow):
                raise parsed
            good.append((number, line, parsed.get("id"), read(parsed)))
        except BadRow as bad_row:
            bad.append((line, bad_row))
    return good, bad


def _with_ids(good: Sequence[tuple[int, int, Any, T]], path: str, stem: str) -> list[Row[T]]:
    """With their own ids if every row has one, else with that of the file and their numbers."""
    own_ids = all(
        isinstance(value, str | int) and not isinstance(value, bool) for _, _, value, _ in good
    )
    return [
        Row(str(declared_id) if own_ids else f"{stem}:{number}", f"{path}:{line}", content)
        for number, line, declared_id, content in good
    ]


def _error_of(path: str, bad: Sequence[Fault]) -> DataError:
    """The first of the bad rows as an error, with the lines of some others."""
    line, first = bad[0]
    others = ""
    if len(bad) > 1:
        lines = ", ".join(str(number) for number, _ in bad[1:6])
        ellipsis = ", …" if len(bad) > 6 else ""
        others = f" ({len(bad)} rows are bad; the others: line {lines}{ellipsis})"
    return DataError(f"{first}{others}", where=f"{path}:{line}", hint=first.hint, code=first.code)


def _refuse_too_many(path: str, bad: Sequence[Fault], most: int, skipped: int) -> None:
    """Refuse bad rows if they are more than `most` with those skipped before; else warn."""
    count = len(bad) + skipped
    if count > most:
        line, last = bad[most - skipped]
        message = f"{count} bad rows, more than max_bad_rows = {most}; one of them: {last}"
        raise DataError(message, where=f"{path}:{line}", hint=last.hint, code=last.code)
    line, first = bad[0]
    logger.warning(
        "%s: %d bad rows skipped; the first: %s:%d: %s", path, len(bad), path, line, first
    )


def _why_none(path: str, bad: Sequence[Fault]) -> str:
    if not bad:
        return "it is empty"
    line, first = bad[0]
    return f"all {len(bad)} rows are bad, the first: {path}:{line}: {first}"


def text_field(fields: dict[str, Any], key: str) -> str:
    """A field that must hold text."""
    if key not in fields:
        raise MissingField(key, fields)
    return _text(fields[key], f"field {key!r}")


def texts_field(fields: dict[str, Any], key: str) -> list[str]:
    """A field that must hold a non-empty list of texts."""
    if key not in fields:
        raise MissingField(key, fields)
    values = fields[key]
    if not isinstance(values, list):
        raise BadRow(f"field {key!r} is {kind_of(values)}, not a list of texts")
    if not values:
        raise BadRow(f"field {key!r} is an empty list")
    return [
        _text(value, f"entry {number} of field {key!r}")
        for number, value in enumerate(values, start=1)
    ]


def numbers_field(fields: dict[str, Any], key: str) -> list[float]:
    """A field that must hold a list of numbers."""
    values = fields.get(key)
    if not isinstance(values, list) or not all(map(is_number, values)):
        raise BadRow(f"field {key!r} is not a list of numbers")
    return [float(value) for value in values]


def is_number(value: Any) -> bool:
    """Whether a value of a row is a number; a table may have `nan` where there is none."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def kind_of(value: Any) -> str:
    """What a value of a row is, in the words of JSON, with an article where it needs one."""
    kinds = {type(None): "null", bool: "true or false", int: "a number", float: "a number",
             str: "text", list: "a list", dict: "an object"}  # fmt: skip
    return kinds.get(type(value), f"of type {type(value).__name__}")


def _text(value: Any, subject: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{subject} is {kind_of(value)}, not text")
    if not value.strip():
        raise BadRow(f"{subject} is empty")
    return value


def json_rows(file: Path) -> Iterator[Parsed]:
    """(number of the row, its line, its content or fault), both counted from 1."""
    try:
        with os.fdopen(open_regular(file), "rb") as opened:
            if not _is_list(opened):
                yield from _lined_rows(opened)
                return
        content = read_regular(file, MAX_LIST)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(
            f"cannot read {file}: {reason}",
            hint="set the dataset's path to a .jsonl file, one row per line",
        ) from error
    yield from _listed_rows(file, content.removeprefix(codecs.BOM_UTF8))


def _is_list(file: BinaryIO) -> bool:
    """Whether the first non-blank character opens a JSON list. Rewinds the file,
    but past a byte order mark."""
    start = file.read(3)
    start = b"" if start == codecs.BOM_UTF8 else start
    start_of_rows = file.tell() - len(start)
    blank = True
    while blank and (start := start or file.read(1 << 16)):
        blank, first, start = not start.strip(), start.lstrip()[:1], b""
    file.seek(start_of_rows)
    return not blank and first == b"["


def _lined_rows(file: BinaryIO) -> Iterator[Parsed]:
    """The rows of a file with one per line. At most MAX_ROW bytes of an over-long line are held in
    memory."""
    line = 0
    while raw := file.readline(MAX_ROW + 1):
        line += 1
        size = len(raw)
        if size > MAX_ROW:
            while not raw.endswith(b"\n") and (raw := file.readline(MAX_ROW)):
                size += len(raw)
            yield (
                line,
                line,
                BadRow(
                    f"a line of {size / 2**20:,.0f} MiB; a row may have {MAX_ROW >> 20} MiB", "F82"
                ),
            )
        elif raw.strip():
            yield line, line, _parse_line(raw.removesuffix(b"\n"))


def _parse_line(raw: bytes) -> dict[str, Any] | BadRow:
    try:
        return _checked(_DECODER.decode(raw.decode("utf-8").strip()))
    except BadRow as error:
        return error
    except UnicodeDecodeError as error:
        return BadRow(
            f"not UTF-8: byte {error.start + 1} of the line is 0x{raw[error.start]:02x}", "F82"
        )
    except json.JSONDecodeError as error:
        ends_within = error.pos == len(error.doc)  # the row may be on several lines
        hint = NOT_TEXT if error.pos == 0 or ends_within else None
        return BadRow(f"not JSON: {error.msg} at column {error.colno}", hint=hint)
    except RecursionError:
        return BadRow("not valid JSON: nested too deeply", "F82")
    except ValueError as error:
        return BadRow(f"not valid JSON: {error}", "F82")


def _listed_rows(file: Path, content: bytes) -> Iterator[Parsed]:
    """The elements of a JSON list. A syntax error raises: nothing after it can be trusted."""
    line, counted_to, number = 1, 0, 0
    try:
        text = content.decode("utf-8")
        end, position = len(text), _skip(text, text.index("[") + 1)
        while not (number == 0 and text[position : position + 1] == "]"):
            line += text.count("\n", counted_to, position)
            counted_to = position
            value, position = _DECODER.raw_decode(text, position)
            number += 1
            yield number, line, checked_row(value)
            position = _skip(text, position)
            mark = text[position : position + 1]
            if mark == "]":
                break
            if mark != ",":
                raise BadRow("the JSON list is broken: ',' or ']' is missing after this row")
            position = _skip(text, position + 1)
        if _skip(text, position + 1) < end:
            raise BadRow("text follows the JSON list")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError("not UTF-8", where=f"{file}:{line}", code="F82") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"not JSON: {error.msg}", where=f"{file}:{error.lineno}", code="F31"
        ) from None
    except (ValueError, RecursionError) as error:
        message = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(
            message, where=f"{file}:{line}", code=getattr(error, "code", "F82")
        ) from None


def _skip(text: str, position: int) -> int:
    """The next position that is not blank."""
    match = re.compile(r"[ \t\r\n]*").match(text, position)
    return match.end() if match else position


def checked_row(value: Any) -> dict[str, Any] | BadRow:
    """A row, or why it is invalid."""
    try:
        return _checked(value)
    except BadRow as error:
        return error


def _checked(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRow(f"a row must be a JSON object, and this one is {kind_of(value)}")
    _refuse_surrogates(value)
    return value


def _refuse_surrogates(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise BadRow(
                "a text holds half of a surrogate pair, which is not a character", "F82"
            ) from None
    elif isinstance(value, dict):
        for key, entry in value.items():
            _refuse_surrogates(key)
            _refuse_surrogates(entry)
    elif isinstance(value, list):
        for entry in value:
            _refuse_surrogates(entry)


def _refuse_constant(name: str) -> None:
    raise BadRow(f"{name} is not a JSON number", "F82")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise BadRow(f"{digits:.40} is too large a number", "F82")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise BadRow(f"field {next(n for n in names if names.count(n) > 1)!r} occurs twice", "F82")
    return fields


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique
)


def _refuse_duplicates(rows: list[Row[T]]) -> None:
    first: dict[str, str] = {}
    repeated = []
    for row in rows:
        if row.id in first:
            repeated.append(f"{row.id!r} at {first[row.id]} and {row.where}")
        first.setdefault(row.id, row.where)
    if repeated:
        shown = "; ".join(repeated[:5]) + ("; …" if len(repeated) > 5 else "")
        raise DataError(f"{len(repeated)} ids are duplicates: {shown}", code="F79")
