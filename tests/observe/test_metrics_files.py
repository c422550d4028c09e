"""metrics.jsonl, samples.jsonl and TensorBoard files: whole lines, strict JSON, no way to stop a run."""

import json
import math
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.errors import DataError
from rlcli.observe.json_lines import encode, read_json_lines
from rlcli.observe.metrics import MetricsWriter, read_metrics
from rlcli.observe.samples import SampleRecord, SampleWriter, read_samples


class Scalar:
    """What a 0-d tensor or array looks like."""

    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value


def test_metrics_round_trip_one_object_per_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(0, {"eval/accuracy": 0.25})
        writer.write(1, {"step": 1, "actor/loss": Scalar(0.5), "time/actor_gen": 2, "actor/early_stop": True})
        assert len(path.read_text().splitlines()) == 2, "each record is there when write returns"
    assert read_metrics(path) == [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "actor/loss": 0.5, "time/actor_gen": 2, "actor/early_stop": True},
    ]


def test_nonfinite_values_are_null_in_the_file_and_back_when_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(4, {"a/x": math.nan, "a/y": math.inf, "a/z": -math.inf, "a/w": 1.0})
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert line["a/x"] is None
    assert line["nonfinite"] == {"a/x": "nan", "a/y": "inf", "a/z": "-inf"}
    (record,) = read_metrics(path)
    assert math.isnan(record.pop("a/x"))
    assert record == {"step": 4, "a/y": math.inf, "a/z": -math.inf, "a/w": 1.0}


def test_torn_last_line_is_left_out_and_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "actor/lo')
    assert read_metrics(path) == [{"step": 1}]
    with MetricsWriter(path) as writer:
        writer.write(2, {})
    assert path.read_text().splitlines()[-1] == '{"step": 2}'


@pytest.mark.parametrize("line", ["{broken}", "[1]"])
def test_bad_line_in_the_middle_names_its_place(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def test_full_disk_costs_one_warning_and_not_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    warnings = []
    with MetricsWriter(tmp_path / "metrics.jsonl", warn=warnings.append) as writer:
        writer.write(1, {})
        with monkeypatch.context() as patch:
            patch.setattr("rlcli.observe.json_lines.os.write", full)
            writer.write(2, {})
        writer.write(3, {})
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_file_that_cannot_be_opened_costs_one_warning(tmp_path):
    warnings = []
    with MetricsWriter(tmp_path / "missing" / "metrics.jsonl", warn=warnings.append) as writer:
        writer.write(1, {"a/x": 1.0})
    assert len(warnings) == 1


def test_tensorboard_gets_every_number(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as writer:
        writer.write(7, {"actor/loss": 0.5, "eval/accuracy": 0.75, "note": "text"})
        (file,) = (tmp_path / "tensorboard").iterdir()
        content = file.read_bytes()  # before close: flushed per step
    events = []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        events.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    scalars = {value.tag: (event.step, value.simple_value) for event in events for value in event.summary.value}
    assert scalars == {"actor/loss": (7, 0.5), "eval/accuracy": (7, 0.75)}


def test_missing_tensorboard_costs_one_warning(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", warnings.append) as writer:
        writer.write(1, {"a/x": 1.0})
    assert len(warnings) == 1
    assert "TensorBoard" in warnings[0]
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "a/x": 1.0}]


def test_tensorboard_that_breaks_on_the_way_costs_one_warning(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    warnings = []
    with MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tensorboard", warnings.append) as writer:
        monkeypatch.setattr("tensorboardX.event_file_writer.EventsWriter.write_event", full)
        writer.write(1, {"a/x": 1.0})
        writer.write(2, {"a/x": 2.0})
    assert len(warnings) == 1
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_samples_round_trip_with_control_characters_as_data(tmp_path):
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


@given(st.text(st.characters()))
def test_any_text_is_one_printable_line_and_comes_back(text):
    line = encode({"text": text})
    assert line.isprintable()
    assert json.loads(line) == {"text": text}
    line.encode()


def test_empty_lines_are_skipped(tmp_path):
    (tmp_path / "x.jsonl").write_text('\n{"a": 1}\n\n')
    assert list(read_json_lines(tmp_path / "x.jsonl")) == [{"a": 1}]
