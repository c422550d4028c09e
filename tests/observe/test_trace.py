"""The file with the timeline of the last steps."""

import json

import pytest

from rlcli.api.timing import TimeSpan
from rlcli.observe import trace
from rlcli.observe.trace import MASTER, STEP, STEPS, TRACE, Traced, TraceFile, read_trace


@pytest.fixture(autouse=True)
def always_written(monkeypatch):
    monkeypatch.setattr(trace, "WRITING_SHARE", 0)


def of_step(number, *besides):
    """A step of a second."""
    window = TimeSpan(f"step {number}", STEP, number, number + 1.0, STEPS)
    call = TimeSpan("gen", "generate", number, number + 0.5, "calls")
    return [Traced(MASTER, window), Traced(0, call, f"step {number}"), *besides]


def test_spans_are_equal_after_they_were_written_and_read(tmp_path):
    wait = Traced(1, TimeSpan("waits for gen", "wait", 3.0, 3.25, "calls"), cause="gen")
    TraceFile(tmp_path, 5).add(3, of_step(3, wait))
    read = read_trace(tmp_path).steps[3]
    zero = read[0].span.began - 3.0
    assert [each.span.shifted(-zero).name for each in read] == ["step 3", "gen", "waits for gen"]
    assert [each.span.seconds for each in read] == pytest.approx([1.0, 0.5, 0.25])
    assert [(each.process, each.of, each.cause) for each in read] == [
        (MASTER, "", ""),
        (0, "step 3", ""),
        (1, "", "gen"),
    ]
    assert [each.span.track for each in read] == ["steps", "calls", "calls"]


def test_events_have_what_viewers_need(tmp_path):
    TraceFile(tmp_path, 5).add(1, of_step(1))
    document = json.loads((tmp_path / TRACE).read_text())
    complete = [each for each in document["traceEvents"] if each["ph"] == "X"]
    for each in complete:
        assert all(isinstance(each[key], int) for key in ("pid", "tid"))
        assert all(isinstance(each[key], float) for key in ("ts", "dur"))
    names = {each["args"].get("name") for each in document["traceEvents"] if each["ph"] == "M"}
    assert {"master", "rank 0", "steps", "calls"} <= names


def test_the_file_has_the_last_steps(tmp_path):
    file = TraceFile(tmp_path, 3)
    for number in range(1, 8):
        file.add(number, of_step(number))
    assert list(read_trace(tmp_path).steps) == [5, 6, 7]


def test_the_file_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MOST_BYTES", 2_000)
    file = TraceFile(tmp_path, 100)
    for number in range(1, 30):
        file.add(number, of_step(number))
    steps = list(read_trace(tmp_path).steps)
    assert steps[-1] == 29
    assert 2 <= len(steps) < 10


def test_a_run_without_trace_steps_has_no_file(tmp_path):
    file = TraceFile(tmp_path, 0)
    file.add(1, of_step(1))
    file.write()
    assert not (tmp_path / TRACE).exists()


def test_the_trace_of_a_resumed_run_continues_without_the_steps_that_are_repeated(tmp_path):
    first = TraceFile(tmp_path, 10)
    for number in (1, 2, 3):
        first.add(number, of_step(number))
    again = TraceFile(tmp_path, 10, step=2)
    assert again.began == pytest.approx(first.began)
    again.add(3, of_step(3))
    read = read_trace(tmp_path)
    assert list(read.steps) == [1, 2, 3]
    assert {each.span.track for of_step in read.steps.values() for each in of_step} == {
        "steps",
        "calls",
    }


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"traceEvents": [{}], "otherData": {}}', '{"traceEvents": 7}']
)
def test_a_file_that_is_something_else_counts_as_none(tmp_path, content):
    (tmp_path / TRACE).write_text(content)
    assert read_trace(tmp_path) is None
    TraceFile(tmp_path, 10, step=2).add(3, of_step(3))
    assert list(read_trace(tmp_path).steps) == [3]


def test_writing_takes_a_small_share_of_the_time(tmp_path, monkeypatch):
    """What was not written is written at the end."""
    monkeypatch.setattr(trace, "WRITING_SHARE", 10**6)
    file = TraceFile(tmp_path, 10)
    for number in (1, 2, 3):
        file.add(number, of_step(number))
    assert list(read_trace(tmp_path).steps) == [1]
    file.write()
    assert list(read_trace(tmp_path).steps) == [1, 2, 3]


def test_a_disk_that_is_full_costs_only_the_timeline(tmp_path, monkeypatch):
    def fail(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace, "replace_file", fail)
    TraceFile(tmp_path, 10).add(1, of_step(1))
