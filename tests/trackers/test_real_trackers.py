"""Runs in the stores of W&B, MLflow, Trackio and TensorBoard, read with their own readers: each
number is that of metrics.jsonl. `make test-trackers` runs them in an environment of their own."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tracked_runs import RECIPE, add_steps, make_run, numbers_of

from rlcli.observe.chart_picture import draw_charts
from rlcli.observe.charts import chart
from rlcli.observe.metrics import read_metrics

LIBRARIES = ("wandb", "mlflow", "trackio", "tensorboard")
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"make test-trackers installs {', '.join(MISSING)}"),
    pytest.mark.timeout(900),
]

HOME = Path(__file__).parents[2]
CANARY = "canary-71930245"
MOST = 1.7976931348623157e308
"""What MLflow's database holds for an infinite number."""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working folder in which all stores are."""
    monkeypatch.chdir(tmp_path)
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_CONFIG_DIR": str(tmp_path / "wandb-settings"),
        "WANDB_CACHE_DIR": str(tmp_path / "wandb-cache"),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "WANDB_API_KEY": CANARY,
        "JUDGE_API_KEY": CANARY,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def track(folder: Path, tracker: str) -> None:
    """`rlcli track`, as a user types it."""
    command = [sys.executable, "-m", "rlcli", "track", str(folder), "--to", tracker]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert f"{tracker} has all steps" in done.stdout


# -- readers: (step, key) → every value that the store has, in order -------------------------------

Stored = dict[tuple[int, str], list[float]]


def stored(triples: Iterator[tuple[int, str, float]]) -> Stored:
    values: Stored = {}
    for step, key, value in triples:
        values.setdefault((step, key), []).append(value)
    return values


def in_wandb(home: Path, folder: Path) -> Stored:
    """By `wandb leet inspect`, which prints the records of a run's file."""
    (file,) = folder.glob("trackers/wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    records = [json.loads(line) for line in printed.stdout.splitlines() if line.startswith("{")]
    rows = [record["history"]["item"] for record in records if "history" in record]
    return stored(
        (row["_step"], key, float(value))
        for row in rows
        for key, value in row.items()
        if "/" in key and not key.startswith("samples/")
    )


def in_mlflow(home: Path, folder: Path) -> Stored:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert run.data.params["train.steps"] == "4"
    return stored(
        (metric.step, metric.key, metric.value)
        for key in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, key)
    )


def in_trackio(home: Path, folder: Path) -> Stored:
    script = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S\n"
        "(run,) = S.get_runs('toy'); print(json.dumps(S.get_logs('toy', run), default=str))"
    )
    command = [sys.executable, "-c", script]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return stored(
        (row["step"], key, float(value))
        for row in json.loads(printed.stdout.splitlines()[-1])
        for key, value in row.items()
        if "/" in key and isinstance(value, int | float | str)
    )


def in_tensorboard(home: Path, folder: Path) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "tensors": 0})
    events.Reload()
    return stored(
        (event.step, tag, event.value)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    )


READERS = {
    "wandb": in_wandb,
    "mlflow": in_mlflow,
    "trackio": in_trackio,
    "tensorboard": in_tensorboard,
}


def assert_equal(tracker: str, home: Path, folder: Path) -> None:
    """The store has each number of metrics.jsonl once, and no other one."""
    expected = numbers_of(read_metrics(folder / "metrics.jsonl"))
    if tracker == "mlflow":
        expected = {at: -MOST if value == -math.inf else value for at, value in expected.items()}
    shown = READERS[tracker](home, folder)
    assert sorted(shown) == sorted(expected)
    assert [len(values) for values in shown.values()] == [1] * len(shown)
    tolerance = 1e-6 if tracker == "tensorboard" else 0.0  # its scalars have 32 bits
    for at, value in expected.items():
        assert shown[at][0] == pytest.approx(value, rel=tolerance, abs=0.0, nan_ok=True), at


@pytest.fixture
def run(home):
    """A run with a curve, whose recipe and responses repeat what is in the environment."""
    tracked = make_run(home / "run", range(4), RECIPE + f"note: {CANARY}\n")
    line = {"step": 3, "id": 7, "prompt": f"{CANARY} <b>", "response": "|", "phase": "eval"}
    with tracked.samples.open("a") as file:
        file.write(json.dumps(line) + "\n")
    drawn = chart("actor/loss", {"run": read_metrics(tracked.metrics)})
    tracked.curve.write_bytes(draw_charts([drawn]))
    return tracked


@pytest.mark.parametrize("tracker", READERS)
def test_each_number_in_the_store_equals_the_file_also_after_repeated_steps(tracker, home, run):
    track(run.path, tracker)
    assert_equal(tracker, home, run.path)
    run.forget_after(2)
    add_steps(run.path, [3, 4, 5], attempt=1)
    track(run.path, tracker)
    assert_equal(tracker, home, run.path)


@pytest.mark.parametrize("tracker", READERS)
def test_no_secret_is_in_any_file_that_a_tracker_writes(tracker, home, run):
    track(run.path, tracker)
    theirs = {file for file in home.rglob("*") if file.is_file()} - {
        run.resolved_recipe,
        run.samples,
    }
    assert [str(file) for file in theirs if CANARY.encode() in file.read_bytes()] == []


@pytest.mark.parametrize("tracker", READERS)
def test_steps_that_come_later_are_added(tracker, home):
    run = make_run(home / "run", [1, 2])
    track(run.path, tracker)
    add_steps(run.path, [3])
    track(run.path, tracker)
    assert_equal(tracker, home, run.path)
