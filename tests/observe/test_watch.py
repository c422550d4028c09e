"""Several runs at once, as `rlcli watch` shows them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_runs import record_run
from rich.console import Console

from rlcli.observe.metrics import MetricsWriter
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.run_overview import read_overview
from rlcli.observe.watch import WatchedRun, lines_of, watch_runs


def running(folder: Path, steps: int = 8) -> Path:
    record_run(folder, steps=4)
    with RunDirectory.reopen(folder) as run:
        run.write_status("running", 4, steps)
    return folder


def look_at(folder: Path):
    """The run, as if its process were alive."""
    overview = read_overview(folder)
    return replace(overview, state="running") if overview.state == "died" else overview


def finish(folder: Path, state: str = "done", exit_code: int = 0) -> None:
    with RunDirectory.reopen(folder) as run, MetricsWriter(run.metrics) as metrics:
        metrics.write(5, {"actor/reward": 0.75, "time/step": 2.0})
        run.write_status(state, 5, 8, exit_code)


def line_of(*runs: WatchedRun, width: int = 80, unicode: bool = True) -> str:
    return lines_of(runs, width, unicode)[0].plain


def test_a_line_has_state_progress_curve_and_remaining_time(tmp_path):
    run = WatchedRun(running(tmp_path / "run"), "a_recipe/with_a_long_name", look_at)
    words = line_of(run).split()
    assert words[:4] == ["a_recipe/with_a_long_name", "running", "4/8", "━━━━────"]
    assert words[4:8] == ["reward", "0.400", "▁▃▆█", "eta"]
    assert line_of(run, unicode=False).isascii()


@pytest.mark.parametrize(
    ("name", "steps", "state"),
    [
        ("short", 8, "running"),
        ("a/sweep-20261127-075000/actor.optim.lr=1e-06,seed=3" * 2, 8, "submitted"),
        ("a/sweep-20261127-075000/actor.optim.lr=1e-06,seed=3", 100_000_000, "running"),
        ("x" * 30, 10**9, "submitted"),
    ],
)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_and_columns_are_left_out_as_a_whole(tmp_path, width, name, steps, state):
    """A name keeps its end, which tells runs of a sweep apart; a number is never cut."""
    runs = [
        WatchedRun(running(tmp_path / "run", steps), name, lambda folder: replace(
            read_overview(folder), state=state
        )),
        WatchedRun(running(tmp_path / "other"), "other", look_at),
    ]  # fmt: skip
    lines = [line.plain for line in lines_of(runs, width, unicode=True)]
    assert all(len(line) <= width for line in lines)
    words = lines[0].split()
    assert words[0].removeprefix("…")
    assert name.endswith(words[0].removeprefix("…"))
    assert words[1:3] == [state, f"4/{steps}"]
    assert "eta" in words
    if "reward" in words:
        assert words[words.index("reward") + 1] == "0.400"


def test_new_steps_are_read_and_a_finished_run_has_no_remaining_time(tmp_path):
    folder = running(tmp_path / "run")
    run = WatchedRun(folder, "run", look_at)
    assert not run.is_over
    finish(folder)
    run.refresh()
    assert run.is_over
    line = line_of(run)
    assert "done" in line
    assert "5/8" in line
    assert "0.750" in line
    assert "eta" not in line


@pytest.mark.parametrize("is_terminal", [True, False])
def test_runs_are_shown_until_all_are_over(tmp_path, monkeypatch, is_terminal):
    first, second = running(tmp_path / "first"), running(tmp_path / "second")
    ends = iter([(first, "done", 0), (second, "failed", 7)])
    monkeypatch.setattr("rlcli.observe.watch.time.sleep", lambda seconds: finish(*next(ends)))
    watched = [WatchedRun(folder, folder.name, look_at) for folder in (first, second)]
    paper = io.StringIO()
    watch_runs(watched, Console(file=paper, width=80, force_terminal=is_terminal))
    assert [run.state for run in watched] == ["done", "failed"]
    lines = paper.getvalue().splitlines()
    if not is_terminal:
        assert [line.split()[:2] for line in lines] == [
            ["first", "running"], ["second", "running"], ["first", "done"], ["second", "failed"],
        ]  # fmt: skip


def test_a_run_whose_folder_is_removed_is_over(tmp_path):
    run = WatchedRun(running(tmp_path / "run"), "run", lambda folder: None)
    assert (run.is_over, run.state) == (True, "gone")
    assert line_of(run).startswith("run")
