"""metrics.jsonl and samples.jsonl: whole lines, strict JSON,
no way to stop a run."""

import contextlib
import errno
import json
import math
import os
import resource
import shutil
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.errors import DataError, ResourceError
from rlcli.observe.json_lines import BLOCK, JsonLines, encode, keep_until, read_json_lines
from rlcli.observe.metrics import MetricsWriter, read_metrics
from rlcli.observe.samples import SampleRecord, SampleWriter, read_samples


class Scalar:
    """What a 0-d tensor or array looks like."""

    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value


def test_metrics_survive_a_round_trip_with_one_object_per_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(0, {"eval/accuracy": 0.25})
        writer.write(
            1, {"step": 1, "actor/loss": Scalar(0.5), "time/actor_gen": 2, "actor/early_stop": True}
        )
        assert len(path.read_text().splitlines()) == 2, "each record is there when write returns"
    assert read_metrics(path) == [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "actor/loss": 0.5, "time/actor_gen": 2, "actor/early_stop": True},
    ]


def test_nonfinite_values_are_null_in_the_file_and_restored_when_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(4, {"a/x": math.nan, "a/y": math.inf, "a/z": -math.inf, "a/w": 1.0})
    line = json.loads(
        path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
    )
    assert line["a/x"] is None
    assert line["nonfinite"] == {"a/x": "nan", "a/y": "inf", "a/z": "-inf"}
    (record,) = read_metrics(path)
    assert math.isnan(record.pop("a/x"))
    assert record == {"step": 4, "a/y": math.inf, "a/z": -math.inf, "a/w": 1.0}


def test_numbers_are_added_to_the_last_record_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.add(0, {"eval/loss": 2.0})
        writer.write(1, {"actor/loss": math.inf})
        first = path.read_text().splitlines()[0]
    with MetricsWriter(path) as writer:
        writer.add(1, {"eval/loss": -math.inf})
        writer.add(2, {"eval/loss": 1.0})
        writer.write(3, {"actor/loss": 0.5})
    assert read_metrics(path) == [
        {"step": 0, "eval/loss": 2.0},
        {"step": 1, "actor/loss": math.inf, "eval/loss": -math.inf},
        {"step": 2, "eval/loss": 1.0},
        {"step": 3, "actor/loss": 0.5},
    ]
    assert path.read_text().splitlines()[0] == first


def test_without_room_for_a_new_file_what_is_added_follows(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {"actor/loss": 0.5})
        monkeypatch.setattr("rlcli.observe.json_lines.replace_file", _full_disk)
        writer.add(1, {"eval/loss": 2.0})
    last = {"step": 1, "actor/loss": 0.5, "eval/loss": 2.0}
    assert read_metrics(path) == [{"step": 1, "actor/loss": 0.5}, last]


def _full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_torn_last_line_is_ignored_and_replaced_by_the_next_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "actor/lo')
    assert read_metrics(path) == [{"step": 1}]
    with MetricsWriter(path) as writer:
        writer.write(2, {})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("torn", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_a_torn_line_of_any_length_is_removed(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    for complete in ("", '{"step": 1}\n'):
        path.write_text(complete + "x" * torn)
        JsonLines(path).close()
        assert path.read_text() == complete


@pytest.mark.parametrize("line", ["{broken}", "[1]"])
def test_an_invalid_line_in_the_middle_is_reported_with_its_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


class Disk:
    """os.write on a disk with room for this many more bytes."""

    def __init__(self, monkeypatch):
        self.room = 0
        self._write = os.write
        monkeypatch.setattr("rlcli.observe.json_lines.os.write", self.write)

    def write(self, descriptor, data):
        if data and not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, data[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", range(12, 60, 5))
def test_lines_that_a_full_disk_rejects_are_written_later_in_order(tmp_path, monkeypatch, room):
    path, warnings, disk = tmp_path / "metrics.jsonl", [], Disk(monkeypatch)
    disk.room = room
    with MetricsWriter(path, warn=warnings.append) as writer:
        for step in range(1, 6):
            writer.write(step, {})
        text = path.read_text()
        assert text == "" or text.endswith("\n"), "no line is torn"
        assert len(text) > room - len('{"step": 1}\n')
        disk.room = 1000
        writer.write(6, {})
        assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5, 6]
    assert len(warnings) == 2
    assert "No space left" in warnings[0]
    assert "is being written again" in warnings[1]


def test_a_file_size_limit_leaves_only_complete_lines(tmp_path):
    """A real short write: RLIMIT_FSIZE cuts the line in its middle."""
    path, warnings = tmp_path / "metrics.jsonl", []
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(path, warn=warnings.append) as writer:
        writer.write(1, {})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
            writer.write(2, {"a/x": 1.5})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.read_text() == '{"step": 1}\n'
        assert "File too large" in warnings[0]
        writer.write(3, {})
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["write", "sync", "reopen"])), max_size=20
    )
)
def test_the_file_always_holds_a_prefix_of_the_lines_written(steps):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        disk, path, written = Disk(patch), Path(folder, "x.jsonl"), 0
        lines = JsonLines(path, warn=lambda text: None)
        for room, action in steps:
            disk.room = room
            if action == "write":
                lines.write({"line": written})
                written += 1
            elif action == "sync":
                with contextlib.suppress(OSError):
                    lines.sync()
                    assert lines.waiting == 0
            elif not lines.waiting:
                lines.close()
                lines = JsonLines(path, warn=lambda text: None)
            text = path.read_text()
            assert text == "".join(f'{{"line": {n}}}\n' for n in range(written - lines.waiting))
        disk.room = 10_000
        lines.sync()
        assert [value["line"] for value in read_json_lines(path)] == list(range(written))
        lines.close()


def test_the_backlog_of_unwritten_lines_has_a_limit(tmp_path, monkeypatch):
    Disk(monkeypatch)
    monkeypatch.setattr("rlcli.observe.json_lines.LARGEST_BACKLOG", 30)
    lines = JsonLines(tmp_path / "x.jsonl", warn=lambda text: None)
    lines.write({"line": 0})
    lines.write({"line": 1})
    with pytest.raises(ResourceError, match="3 lines wait to be written: No space left") as caught:
        lines.write({"line": 2})
    assert caught.value.code == "F28"


def test_a_file_whose_sync_failed_is_written_again(tmp_path, monkeypatch):
    """What the system still holds of such a file may never reach the disk."""
    path = tmp_path / "x.jsonl"
    lines, sync = JsonLines(path), os.fsync
    lines.write({"line": 0})
    before = path.stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr("rlcli.observe.json_lines.os.fsync", lambda descriptor: sync(10**6))
        with pytest.raises(OSError, match="Bad file descriptor"):
            lines.sync()
    lines.sync()
    assert path.stat().st_ino != before
    lines.write({"line": 1})
    lines.sync()
    assert [value["line"] for value in read_json_lines(path)] == [0, 1]
    lines.close()


@pytest.mark.parametrize("lose", [os.unlink, shutil.rmtree, "replace"])
def test_a_file_that_somebody_removes_or_replaces_is_put_back(tmp_path, lose):
    path, warnings = tmp_path / "run" / "x.jsonl", []
    path.parent.mkdir()
    lines = JsonLines(path, warnings.append)
    lines.write({"line": 0})
    if lose == "replace":  # as an editor saves it
        (tmp_path / "edited").write_text('{"line": "edited"}\n')
        os.replace(tmp_path / "edited", path)
    else:
        lose(path if lose is os.unlink else path.parent)
    lines.write({"line": 1})
    lines.sync()
    lines.write({"line": 2})
    lines.sync()
    lines.close()
    assert [value["line"] for value in read_json_lines(path)] == [0, 1, 2]
    assert len(warnings) == 1
    assert "x.jsonl was removed or replaced" in warnings[0]


@pytest.mark.parametrize(
    ("content", "step", "remaining", "reported"),
    [
        ("", 0, "", None),
        ('{"step": 1}\n{"step": 2}\n', 2, '{"step": 1}\n{"step": 2}\n', None),
        ('{"step": 1}\n{"step": 2}\n', 1, '{"step": 1}\n', "x.jsonl: 1 line of step 2 dropped"),
        (
            '{"step": 1}\n{"step": 2}\n{"step": 2}\n{"step": 3}\n{"st', 1, '{"step": 1}\n',
            "x.jsonl: 4 lines of steps 2 to 3 dropped, 1 of them unreadable",
        ),
        ('{"step": 1}\nbroken\n{"step": 2}\n', 2, '{"step": 1}\n{"step": 2}\n',
         "x.jsonl: 1 line dropped, 1 of them unreadable"),
    ],
)  # fmt: skip
def test_lines_of_later_steps_are_dropped_and_counted(tmp_path, content, step, remaining, reported):
    path = tmp_path / "x.jsonl"
    assert keep_until(path, step) is None
    path.write_text(content)
    dropped = keep_until(path, step)
    assert path.read_text() == remaining
    assert (str(dropped) if dropped else None) == reported


def test_records_share_the_names_of_their_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in (1, 2):
            writer.write(step, {"actor/loss": 0.5, "actor/kl": math.nan})
    first, second = read_metrics(path)
    assert list(first) == ["step", "actor/loss", "actor/kl"]
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_a_large_file_is_not_read_into_memory_to_drop_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    line = b'{"step": %d, "response": "' + b"x" * 1000 + b'"}\n'
    path.write_bytes(b"".join(line % step for step in range(4000)))
    remaining = b"".join(line % step for step in range(3990))
    tracemalloc.start()
    keep_until(path, 3989)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.read_bytes() == remaining
    assert peak < len(remaining) / 8


def test_a_file_that_cannot_be_opened_is_one_warning(tmp_path):
    warnings = []
    with MetricsWriter(tmp_path / "missing" / "metrics.jsonl", warn=warnings.append) as writer:
        writer.write(1, {"a/x": 1.0})
    assert len(warnings) == 1


def test_samples_survive_a_round_trip_with_control_characters(tmp_path):
    path = tmp_path / "samples.jsonl"
    nasty = "\x1b[2J\x07 \x9b31m \u202e \x7f \u2028 日本 😀 \ud800 \n end"
    samples = [
        SampleRecord(step=3, id="row-1", prompt=nasty, response=nasty, reward=1.0, answer="42"),
        SampleRecord(step=3, id=2, prompt="", response="", reward=math.nan, phase="eval"),
    ]
    with SampleWriter(path) as writer:
        for sample in samples:
            writer.write(sample)
    text = path.read_text()
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "日本 😀" in text
    first, second = read_samples(path)
    assert first == samples[0]
    assert (second.reward, second.phase) == (None, "eval")


@pytest.mark.parametrize(
    ("line", "says"),
    [("[" * 5000, "nested"), ('{"step": ' + "9" * 5000 + "}", "number"), ('{"step": {}}', "step")],
)
def test_lines_of_strangers_are_reported(tmp_path, line, says):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(DataError, match=says):
        read_metrics(path)
    assert keep_until(path, 3) is not None


@pytest.mark.parametrize("field", [
    {"id": [1]}, {"reward": 10**400}, {"number": "1"}, {"finish": {}},
    {"token_logprobs": [10**400]},
])  # fmt: skip
def test_fields_that_no_run_writes_are_reported(tmp_path, field):
    path = tmp_path / "samples.jsonl"
    sample = {"step": 1, "id": 1, "prompt": "", "response": "", **field}
    path.write_text(json.dumps(sample) + "\n")
    with pytest.raises(DataError, match="a field has the wrong type"):
        read_samples(path)


def test_a_line_that_is_not_a_sample_is_reported(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "who": "a stranger"}\n')
    with pytest.raises(DataError, match=r"not a sample.*who"):
        read_samples(tmp_path / "samples.jsonl")


def test_a_file_closed_by_someone_else_is_reopened(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(1, {"loss": 1.0})
        os.close(writer.lines._descriptor)
        writer.write(2, {"loss": 2.0})
        writer.write(3, {"loss": 3.0})
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@given(st.text(st.characters()))
def test_any_text_is_encoded_as_one_printable_line_and_restored(text):
    line = encode({"text": text})
    assert line.isprintable()
    assert json.loads(line) == {"text": text}
    line.encode()


def test_empty_lines_are_skipped(tmp_path):
    (tmp_path / "x.jsonl").write_text('\n{"a": 1}\n\n')
    assert list(read_json_lines(tmp_path / "x.jsonl")) == [{"a": 1}]
