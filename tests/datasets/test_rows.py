"""Reading rows: which are accepted, and that all others are reported with file and line."""

import json
import os
import socket
import tracemalloc
from pathlib import Path

import pytest

from rlcli.datasets._jsonl import read_rows, text_field, texts_field
from rlcli.errors import DataError

GOOD = '{"t": "one"}'


def read(fields):
    return text_field(fields, "t")


@pytest.fixture
def file(tmp_path):
    """Writes a file with these lines and returns its path."""

    def write(*lines, name="rows.jsonl"):
        content = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ('{"t": "cut in ha', "F31", "not JSON"),
        ('{"t": "one",}', "F31", "not JSON"),
        ('{"t": "one"', "F31", "not JSON"),
        ('{"t": "one"} {"t": "two"}', "F31", "not JSON: Extra data"),
        ('"one"', "F31", "must be a JSON object"),
        ('{"u": "one"}', "F31", "there is no field 't'; the row has .'u'."),
        ('{"t": 1}', "F31", "field 't' is a number, not text"),
        ('{"t": null}', "F31", "field 't' is null, not text"),
        ('{"t": " \\n"}', "F31", "field 't' is empty"),
        ('{"t": "a", "t": "b"}', "F82", "field 't' occurs twice"),
        ('{"t": "a", "n": {"x": 1, "x": 2}}', "F82", "field 'x' occurs twice"),
        ('{"t": "a", "n": NaN}', "F82", "NaN is not a JSON number"),
        ('{"t": "a", "n": -Infinity}', "F82", "-Infinity"),
        ('{"t": "a", "n": 1e999}', "F82", "too large"),
        ('{"t": "a", "n": ' + "9" * 5000 + "}", "F82", "cannot|not valid JSON"),
        ('{"t": "\\ud800"}', "F82", "surrogate"),
        ('{"t": "a", "n": ["\\udfff"]}', "F82", "surrogate"),
        ('{"t": ' + "[" * 100_000 + "]" * 100_000 + "}", "F82", "nested too deeply"),
        (b'{"t": "\xff"}', "F82", "not UTF-8: byte 8 of the line is 0xff"),
        (b'{"t": "\xed\xa0\x80"}', "F82", "not UTF-8"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_row_is_reported_with_file_and_line(file, line, code, message):
    path = file(GOOD, "", GOOD, line, GOOD)
    with pytest.raises(DataError, match=message) as caught:
        read_rows(path, read)
    assert (caught.value.where, caught.value.code, caught.value.exit_code) == (f"{path}:4", code, 4)
    rows = read_rows(path, read, bad_rows="skip")
    assert [row.id for row in rows] == ["rows:1", "rows:3", "rows:5"]


def test_utf_16_is_refused(file):
    with pytest.raises(DataError, match="not UTF-8"):
        read_rows(file(GOOD.encode("utf-16")), read)


def test_unusual_but_valid_rows_are_read(file):
    path = file(
        b"\xef\xbb\xbf" + GOOD.encode() + b"\r", "   ", '{"t": "snow\u2028 \\ud83d\\ude00"}', ""
    )
    assert [(row.id, row.content) for row in read_rows(path, read)] == [
        ("rows:1", "one"),
        ("rows:3", "snow\u2028 \U0001f600"),
    ]


def test_more_bad_rows_than_allowed_are_an_error(file):
    path = file(GOOD, "{", "{", "{")
    assert len(read_rows(path, read, bad_rows="skip", max_bad_rows=3)) == 1
    with pytest.raises(DataError, match="3 bad rows, more than max_bad_rows = 2") as caught:
        read_rows(path, read, bad_rows="skip", max_bad_rows=2)
    assert caught.value.where == f"{path}:4"


def test_max_rows_reads_from_the_start_and_no_further(file):
    path = file(GOOD, '{"t": "two"}', "{")
    assert [row.content for row in read_rows(path, read, max_rows=2)] == ["one", "two"]
    with pytest.raises(ValueError, match="max_rows is 0"):
        read_rows(path, read, max_rows=0)


@pytest.mark.parametrize(
    ("lines", "message"),
    [([], "it is empty"), (["", " "], "it is empty"), (["{", "[]"], "all 2 rows are bad")],
)
def test_a_file_without_rows_is_refused_with_the_reason(file, lines, message):
    path = file(*lines)
    with pytest.raises(DataError, match=message) as caught:
        read_rows(path, read, bad_rows="skip")
    assert caught.value.code == "F80"


def test_a_missing_file_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="No such file") as caught:
        read_rows(str(tmp_path / "none.jsonl"), read)
    assert caught.value.exit_code == 4
    with pytest.raises(DataError, match="cannot read"):
        read_rows(str(tmp_path), read)


def test_ids_in_the_file_are_used_if_all_rows_have_one(file):
    with_ids = [json.dumps({"t": "x", "id": i}) for i in ("a", 7)]
    assert [row.id for row in read_rows(file(*with_ids), read)] == ["a", "7"]
    assert [row.id for row in read_rows(file(*with_ids, GOOD), read)] == [
        "rows:1",
        "rows:2",
        "rows:3",
    ]


def test_duplicate_ids_are_counted_and_located(file):
    path = file(*(json.dumps({"t": "x", "id": i % 3}) for i in range(10)))
    with pytest.raises(DataError, match="7 ids are duplicates") as caught:
        read_rows(path, read)
    assert caught.value.code == "F79"
    assert f"'0' at {path}:1 and {path}:4" in str(caught.value)
    assert str(caught.value).count(" and ") == 5


def test_rows_of_a_json_list_have_their_line_numbers(file):
    path = file("[", ' {"t": "one"},', ' {"t":', '  "two"}, {"t": "three"}', "]", name="rows.json")
    rows = read_rows(path, read)
    assert [row.content for row in rows] == ["one", "two", "three"]
    assert [row.where for row in rows] == [f"{path}:2", f"{path}:3", f"{path}:4"]
    assert [row.id for row in rows] == ["rows:1", "rows:2", "rows:3"]


@pytest.mark.parametrize(
    ("lines", "line", "message"),
    [
        (["[", GOOD + ",", '{"t": 3}]'], 3, "is a number"),
        (["[", GOOD + ",", "3]"], 3, "must be a JSON object"),
        (["[", GOOD, GOOD + "]"], 2, "',' or ']' is missing"),
        (["[", GOOD + ",", "]"], 3, "not JSON"),
        (["[", GOOD], 2, "',' or ']' is missing"),
        (["[", GOOD + "]", "x"], 2, "text follows"),
        (["[", '{"t": NaN}]'], 2, "NaN"),
        (["[", b'{"t": "\xff"}]'], 2, "not UTF-8"),
    ],
)
def test_an_invalid_json_list_is_reported_with_the_line(file, lines, line, message):
    path = file(*lines, name="rows.json")
    with pytest.raises(DataError, match=message) as caught:
        read_rows(path, read)
    assert caught.value.where == f"{path}:{line}"


def test_an_empty_json_list_is_refused(file):
    with pytest.raises(DataError, match="it is empty"):
        read_rows(file("[ ]"), read)


def test_invalid_lists_of_texts_are_refused(file):
    for value, message in [
        ("x", "not a list"),
        ([], "is an empty list"),
        (["a", 1], "entry 2 of field 't' is a number"),
        (["a", ""], "entry 2 of field 't' is empty"),
    ]:
        with pytest.raises(DataError, match=message):
            read_rows(file(json.dumps({"t": value})), lambda fields: texts_field(fields, "t"))


def test_all_bad_rows_are_reported_in_one_error(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"x": 1}\n{"y": 2}\nnot json\n{"x": 3}\n{}\n')
    with pytest.raises(DataError) as caught:
        read_rows(
            str(file), lambda fields: text_field(fields, "z") if "x" not in fields else fields["x"]
        )
    assert caught.value.where == f"{file}:2"
    assert "3 rows are bad; the others: line 3, 5" in caught.value.what


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "socket"])
def test_special_files_are_refused_without_opening_them(tmp_path, kind):
    path = tmp_path / "rows.jsonl"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path = Path("/dev/zero")
        case "folder":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
    with pytest.raises(DataError, match="not an ordinary file"):
        read_rows(str(path), read)


def test_a_line_that_is_too_long_is_reported_without_reading_it(tmp_path):
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(b'{"t": "one"}\n{"t": "')
        for _ in range(100):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"t": "two"}')
    tracemalloc.start()
    with pytest.raises(DataError, match="a line of 100 MiB; a row may have 8 MiB") as caught:
        read_rows(str(path), read)
    assert caught.value.where == f"{path}:2"
    rows = read_rows(str(path), read, bad_rows="skip")
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert [(row.content, row.where) for row in rows] == [
        ("one", f"{path}:1"),
        ("two", f"{path}:3"),
    ]


def test_a_json_list_that_is_too_large_is_refused_by_its_size(tmp_path):
    path = tmp_path / "rows.json"
    with path.open("wb") as file:
        file.write(b"\xef\xbb\xbf \n [")
        file.truncate(1 << 40)
    with pytest.raises(DataError, match="1,048,576 MiB, more than the 128 MiB allowed"):
        read_rows(str(path), read)


@pytest.mark.parametrize("start", ["", "\ufeff", " \n\t\n", "\ufeff" + " " * 200_000 + "\n"])
def test_leading_blanks_and_a_byte_order_mark_are_skipped(tmp_path, start):
    path = tmp_path / "rows.json"
    path.write_text(start + '{"t": "one"}\n', encoding="utf-8")
    assert [row.content for row in read_rows(str(path), read)] == ["one"]
    path.write_text(start + '[{"t": "one"}]\n', encoding="utf-8")
    assert [row.content for row in read_rows(str(path), read)] == ["one"]
