"""A run as recorded in its files: each line once, and the pace of steps that were done before."""

import io
import json
import os
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from rich.console import Console

from rlcli.observe import progress
from rlcli.observe.charts import ChartLine, chart, mean_of, metric_key
from rlcli.observe.events import EventDisplay, show_event
from rlcli.observe.live import LiveDisplay
from rlcli.observe.metrics import records_of
from rlcli.observe.replay import FollowedRun, follow, progress_so_far, replay
from rlcli.observe.run_overview import read_overview
from rlcli.observe.series import NAMES, find_key
from rlcli.observe.tail import LARGEST_LINE, Tail, last_lines
from rlcli.observe.terminal_chart import HEIGHT, chart_lines


def test_complete_lines_are_read_once_and_a_replaced_file_from_its_start(tmp_path):
    file = tmp_path / "metrics.jsonl"
    tail = Tail(file)
    assert tail.lines() == ([], False)
    file.write_bytes(b"one\ntwo\nthr")
    assert tail.lines() == ([b"one", b"two"], False)
    assert tail.lines() == ([], False)
    with file.open("ab") as opened:
        opened.write(b"ee\n")
    assert tail.lines() == ([b"three"], False)
    os.truncate(file, 4)
    assert tail.lines() == ([b"one"], True)
    (tmp_path / "new").write_bytes(b"one\nother\n")
    os.replace(tmp_path / "new", file)
    assert tail.lines() == ([b"one", b"other"], True)


def test_last_lines_are_read_from_the_end_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("rlcli.observe.tail.FIRST_LOOK", 16)
    file = tmp_path / "log"
    file.write_bytes(b"".join(b"line %d\n" % number for number in range(100)) + b"torn")
    tail = Tail(file)
    assert tail.last(3) == [b"line 97", b"line 98", b"line 99"]
    assert tail.lines() == ([], False)
    assert last_lines(file, 2) == [b"line 99", b"torn"]
    assert len(last_lines(file, 1000)) == 101
    assert (
        Tail(tmp_path / "none").last(1)
        == last_lines(tmp_path / "none", 1)
        == Tail(file).last(0)
        == []
    )
    os.mkfifo(tmp_path / "pipe")
    assert Tail(tmp_path / "pipe").lines() == ([], False)


def test_an_overlong_line_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("rlcli.observe.tail.LARGEST_LINE", 100)
    assert LARGEST_LINE > 100
    file = tmp_path / "log"
    file.write_bytes(b"x" * 200)
    tail = Tail(file)
    assert tail.lines() == ([], False)
    with file.open("ab") as opened:
        opened.write(b"\nnext\n")
    assert tail.lines() == ([b"", b"next"], False)


def test_the_pace_of_a_replay_includes_checkpoints_and_evaluations():
    times = {"time/checkpoint": 2.0, "time/step": 3.0, "time/eval": 1.0}
    progress = replay([{"step": n, **times} for n in range(1, 5)], 10, until=1000.0)
    assert progress.seconds_per_step == pytest.approx(6.0)


def test_replay_takes_the_pace_from_records_and_skips_unreadable_lines():
    lines = [
        json.dumps({"step": n, "actor/reward": n / 10, "time/step": 3.0}).encode()
        for n in range(1, 11)
    ]
    records = records_of(
        [b'{"step": 0, "eval/reward": 0.5}', *lines, b"torn", b"[]", b'{"step": "x"}']
    )
    progress = replay(records, 20, until=1000.0)
    assert progress.done == 10
    assert progress.seconds_per_step == pytest.approx(3.0)
    assert progress.evaluated("reward") == [0.5]
    assert records_of([b'{"step": 1, "a": null, "nonfinite": {"a": "inf", "b": "__import__"}}'])[0][
        "a"
    ] == float("inf")


def test_the_keys_of_curves_are_looked_for_once_in_records_that_have_the_same(monkeypatch):
    looked = []

    def find(keys, name):
        looked.append(name)
        return find_key(keys, name)

    monkeypatch.setattr(progress, "find_key", find)
    records = [{"step": step, "of_this_test/kl": 0.5, "x/reward": step} for step in range(1, 101)]
    assert replay(records, 100, until=1e9).curves["reward"] == [*range(1, 101)]
    assert len(looked) == len(NAMES)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_does_not_change_the_pace_of_a_resumed_run(tmp_path, monkeypatch, jump):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 3.0}\n')
    now, monotonic = [1e9], [500.0]
    clock = SimpleNamespace(time=lambda: now[0], monotonic=lambda: monotonic[0])
    monkeypatch.setattr("rlcli.observe.replay.time", clock)
    resumed = progress_so_far(tmp_path / "metrics.jsonl", 12)
    for step in (2, 3):
        monotonic[0] += 4.0
        now[0] += 4.0 + jump
        resumed.step({"step": step})
    assert (resumed.seconds_per_step, resumed.eta, resumed.elapsed) == (4.0, 36.0, 11.0)


def test_a_run_whose_machine_has_a_clock_ahead_of_ours_was_updated_just_now(tmp_path):
    status = {"run_id": "r", "state": "running", "step": 1, "steps": 2}
    ahead = datetime.now(UTC) + timedelta(seconds=90)
    (tmp_path / "status.json").write_text(json.dumps(status | {"updated": ahead.isoformat()}))
    assert read_overview(tmp_path).age == 0.0


def test_the_duration_of_a_finished_run_is_the_sum_of_its_steps(tmp_path):
    lines = [json.dumps({"step": n, "time/step": 3.0}) + "\n" for n in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    status = {
        "run_id": "r",
        "state": "done",
        "exit_code": 0,
        "step": 10,
        "steps": 10,
        "updated": "2020-01-01T00:00:30+00:00",
    }
    (tmp_path / "status.json").write_text(json.dumps(status))
    paper = io.StringIO()
    with LiveDisplay(Console(file=paper, force_terminal=True, width=80)) as display:
        assert not follow(FollowedRun(tmp_path), display, "old").is_under_way
        display.finish()
    assert "took 0:30" in paper.getvalue()[paper.getvalue().rindex("step 10/10") :]


def test_a_resumed_run_continues_in_the_display_of_another_program(tmp_path):
    """What it has written meanwhile comes with the events that follow."""
    records = [{"step": n, "actor/reward": n / 10, "time/step": 3.0} for n in range(1, 5)]
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0, "eval/reward": 0.5}\n' + "".join(map(as_line, records[:3])))
    reading, writing = os.pipe()
    with EventDisplay(writing) as sender:
        sender.start("toy", tmp_path, 5, "warm start toy")
        sender.take_up(progress_so_far(file, 5))
        sender.step(records[3])
        sender.evaluation(4, {"eval/reward": 0.75})
    del sender
    file.write_text(file.read_text() + as_line(records[3]))
    steps, reward, evaluated, *_ = shown_after(reading)
    assert steps.startswith("warm start toy 4/5")
    assert "▁▃▆█" in reward
    assert "0.500 at first, last at step 4" in evaluated


def shown_after(reading):
    """The lines of the live display after all events from a pipe."""
    display = LiveDisplay(Console(file=io.StringIO(), force_terminal=True, width=80))
    with display, os.fdopen(reading) as events:
        for line in events:
            show_event(line, display)
        return [line.plain for line in display.picture().renderables]


def test_the_pace_of_a_resumed_run_is_that_of_its_steps_since_then(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(as_line({"step": 1, "time/step": 1000.0}))
    progress = progress_so_far(tmp_path / "metrics.jsonl", 5)
    assert (progress.done, progress.seconds_per_step) == (1, None)
    progress.step({"step": 2})
    assert progress.seconds_per_step < 10


def as_line(record):
    return json.dumps(record) + "\n"


def test_a_metric_name_is_resolved_to_its_key():
    keys = ["step", "reward/reward", "actor/kl", "actor/loss", "eval/loss", "actor/grad_norm"]
    keys_by_name = {
        name: metric_key(name, keys)
        for name in ("reward", "kl", "loss", "eval/loss", "grad_norm", "x")
    }
    assert keys_by_name == {
        "reward": "reward/reward",
        "kl": "actor/kl",
        "loss": "actor/loss",
        "eval/loss": "eval/loss",
        "grad_norm": "actor/grad_norm",
        "x": None,
    }


def test_mean_and_spread_cover_the_steps_that_all_lines_have():
    first, second = (
        ChartLine("1", [1.0, 2.0, 3.0], [0.0, 1.0, 5.0]),
        ChartLine("2", [1.0, 2.0], [2.0, 1.0]),
    )
    mean = mean_of("both", [first, second])
    assert (mean.steps, mean.values) == ([1.0, 2.0], [1.0, 1.0])
    assert mean.spread == pytest.approx([2**0.5, 0.0])
    assert mean_of("alone", [first]).spread is None


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize(
    "values", [[1.0], [0.0, 1e300, -1e300], [2.0, 2.0], [float(n % 7) for n in range(500)]]
)
def test_a_chart_fits_the_terminal_for_any_values(values, unicode):
    records = [{"step": step, "x": value} for step, value in enumerate(values)]
    drawn = chart("x", {"a": records, "b": records})
    for width in (20, 80):
        lines = [
            "".join(text for text, _ in parts)
            for parts in chart_lines(drawn, width, colours=True, unicode=unicode)
        ]
        assert len(lines) == 1 + HEIGHT + 1 + 2
        assert max(map(len, lines)) <= max(width, 34)
        assert unicode or all(line.isascii() for line in lines)


def test_a_steep_line_has_no_gaps():
    records = [{"step": 0, "x": 0.0}, {"step": 1, "x": 1.0}]
    lines = [
        "".join(text for text, _ in parts)
        for parts in chart_lines(chart("x", {"a": records}), 30, colours=True, unicode=True)
    ]
    rows = [line.partition("│")[2].strip() for line in lines[1 : 1 + HEIGHT]]
    assert all(rows)
