"""A tracker gets each step of a run once, whatever happens to the run or to the mirror, and no
secret."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tracked_runs import (
    RECIPE,
    MemoryTracker,
    add_steps,
    make_run,
    numbers_of,
    tensorboard_events,
    tensorboard_scalars,
)

from rlcli.cli import track
from rlcli.errors import ResourceError, RlcliError
from rlcli.files import replace_file
from rlcli.observe.metrics import read_metrics
from rlcli.observe.samples import SampleRecord
from rlcli.observe.trackers import mirror, run_files
from rlcli.observe.trackers.contract import CLASSES, Update, make_tracker
from rlcli.observe.trackers.description import describe_run
from rlcli.observe.trackers.mirror import Mirror
from rlcli.observe.trackers.redaction import Redactor
from rlcli.recipe.sections.log import Tracker
from rlcli.recipe.synonyms import TRACKERS
from rlcli.registry.requirements import read_requirements


def mirrored(folder: Path, tracker: MemoryTracker) -> MemoryTracker:
    """The tracker, with everything that the run has written."""
    following = Mirror(folder, "memory", tracker)
    assert following.acquire()
    following.open()
    following.close()
    return tracker


def shown(updates: list[Update]) -> tuple[dict[tuple[int, str], float], list[int]]:
    """The numbers that a tracker shows, and the steps whose samples it shows."""
    numbers: dict[tuple[int, str], float] = {}
    for update in updates:
        for key, value in update.numbers.items():
            assert (update.step, key) not in numbers, "a duplicate"
            numbers[update.step, key] = value
    return numbers, [sample.step for update in updates for sample in update.samples]


def assert_equal(tracker: MemoryTracker, folder: Path) -> None:
    """The tracker shows exactly what the run's files say."""
    records = read_metrics(folder / "metrics.jsonl")
    numbers, sample_steps = shown(tracker.updates)
    assert repr(sorted(numbers.items())) == repr(sorted(numbers_of(records).items()))
    assert sample_steps == [record["step"] for record in records]


def test_every_number_and_sample_arrives_once_and_in_order(tmp_path):
    run = make_run(tmp_path / "run", range(4))
    tracker = mirrored(run.path, MemoryTracker())
    assert_equal(tracker, run.path)
    assert [update.step for update in tracker.updates] == [0, 1, 2, 3]
    assert math.isnan(tracker.updates[1].numbers["actor/odd"])
    assert tracker.updates[1].numbers["actor/limit"] == -math.inf
    assert tracker.updates[1].samples_by_phase()["train"][0].response == "attempt 0"
    assert tracker.state == "done"


def test_a_later_mirror_adds_only_what_is_new(tmp_path):
    run, tracker = make_run(tmp_path / "run", [1, 2]), MemoryTracker()
    mirrored(run.path, tracker)
    add_steps(run.path, [3])
    before = len(tracker.updates)
    assert [update.step for update in mirrored(run.path, tracker).updates[before:]] == [3]
    assert tracker.discarded == []


def test_half_a_line_waits_for_its_other_half(tmp_path):
    run, tracker = make_run(tmp_path / "run", [1]), MemoryTracker()
    following = Mirror(run.path, "memory", tracker)
    following.open()
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "actor/loss"')
        file.flush()
        following.catch_up()
        assert [update.step for update in tracker.updates] == [1]
        file.write(b': 0.5}\n{"broken\n[1]\n{"step": 3}\n')
        file.flush()
        following.catch_up()
    assert [(update.step, update.numbers) for update in tracker.updates[1:]] == [
        (2, {"actor/loss": 0.5}),
        (3, {}),
    ]


@pytest.mark.parametrize(
    ("file", "text"), [("metrics.jsonl", '"text"'), ("samples.jsonl", '"1+1?"')]
)
def test_of_files_that_are_read_in_parts_none_is_ahead(tmp_path, monkeypatch, file, text):
    monkeypatch.setattr(run_files, "AT_ONCE", 2000)
    run = make_run(tmp_path / "run", range(8))
    longer = (run.path / file).read_text().replace(text, f'"{"x" * 1000}"')
    (run.path / file).write_text(longer)
    updates = mirrored(run.path, MemoryTracker()).updates
    assert [update.step for update in updates] == list(range(8))
    assert all(update.numbers and update.samples for update in updates)


@pytest.fixture
def wandb_run(tmp_path, monkeypatch):
    """What W&B gets of a run: its rows by step, and the summary. A table is its number of rows."""
    logged = {}
    run = SimpleNamespace(
        dir=str(tmp_path / "files"),
        step=0,
        log=lambda values, step, commit: logged.setdefault(step, []).append(values),
        finish=lambda exit_code: None,
        logged=logged,
        summary={},
    )
    wandb = SimpleNamespace(
        init=lambda **_: run, Settings=dict, Table=lambda columns, data: len(data), Image=str
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return run


def test_wandb_gets_one_row_for_a_step_whenever_its_samples_come(tmp_path, wandb_run):
    tracker, samples = (
        make_tracker("wandb"),
        [SampleRecord(step=1, id=1, prompt="1+1?", response="2")],
    )
    tracker.open(describe_run(make_run(tmp_path / "run").path, Redactor({})), None)
    tracker.write([Update(1, {}, samples)])  # the step is being evaluated
    tracker.write([Update(1, {"loss": 1.0}), Update(2, {"loss": 2.0})])
    tracker.write([Update(2, {}, samples)])  # late
    tracker.write([Update(3, {"loss": 3.0}, samples), Update(3, {}, samples)])
    tracker.close("done", Path("curve.png"))
    assert wandb_run.logged == {
        1: [{"loss": 1.0, "samples/train": 1}],
        2: [{"loss": 2.0}],
        3: [{"loss": 3.0, "samples/train": 2}],
    }
    assert wandb_run.summary == {"samples/train": 1, "curve": "curve.png"}


OPERATIONS = ("step", "look", "end", "kill", "rewind", "rewrite")


@given(st.lists(st.sampled_from(OPERATIONS), max_size=10))
def test_no_sequence_of_ends_and_repeated_steps_leaves_gaps_or_duplicates(operations):
    with tempfile.TemporaryDirectory() as home:
        run, tracker = make_run(Path(home) / "run", [1]), MemoryTracker()
        following, attempt, step = Mirror(run.path, "memory", tracker), 0, 1
        following.open()
        for operation in operations:
            match operation:
                case "step":
                    step += 1
                    add_steps(run.path, [step], attempt)
                case "look":
                    following.catch_up()
                case "end" | "kill":
                    if operation == "end":
                        following.close()
                    following = Mirror(run.path, "memory", tracker)
                    following.open()
                case "rewind":
                    step, attempt = step // 2, attempt + 1
                    run.forget_after(step)
                case "rewrite":  # as after a sync that failed
                    file = run.path / "metrics.jsonl"
                    replace_file(file, file.read_bytes())
        following.close()
        assert_equal(tracker, run.path)


def test_only_one_mirror_at_a_time_writes_to_a_tracker(tmp_path):
    run = make_run(tmp_path / "run", [1])
    first, second = (Mirror(run.path, "memory", MemoryTracker()) for _ in range(2))
    assert first.acquire()
    assert not second.acquire()


def test_a_mirror_stops_before_it_takes_the_last_of_the_disk(tmp_path, monkeypatch):
    run, tracker = make_run(tmp_path / "run", [1]), MemoryTracker()
    following = Mirror(run.path, "memory", tracker)
    following.open()
    monkeypatch.setattr(mirror, "free_bytes", lambda folder: mirror.LEAST_FREE - 1)
    with pytest.raises(ResourceError, match="left to the run"):
        following.catch_up()
    assert tracker.updates == []


# -- what is shown of a run ------------------------------------------------------------------------


def test_secrets_of_the_environment_and_of_the_recipe_are_redacted(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "canary-7193")
    run = make_run(tmp_path / "run", [1], RECIPE + "note: my canary-7193\n")
    line = '{"step": 1, "id": 1, "prompt": "say canary-7193", "response": "canary-7193"}\n'
    (run.path / "samples.jsonl").write_text(line)
    tracker = mirrored(run.path, MemoryTracker())
    everything = f"{tracker.run} {tracker.updates}"
    assert "canary" not in everything
    assert "hunter22" not in everything
    assert tracker.run.settings["note"] == "my <redacted>"
    assert tracker.run.settings["judge.url"] == "http://<redacted>@judge/"
    assert tracker.run.settings["train.steps"] == 4
    assert tracker.run.origins == {"train.steps": "toy.yaml:3:16"}


@pytest.mark.parametrize("secret", [
    {"setup": ["module load x", "export HF_TOKEN=canary-1 && export WANDB_API_KEY='canary 2'"]},
    {"setup": "AWS_SECRET_ACCESS_KEY=canary-1 python serve.py"},
    {"command": ["serve", "--api-key", "canary-1", "--port", "8000"]},
    {"command": ["serve", "--api-key=canary-1"]},
    {"command": ["sh", "-c", "serve --auth-token canary-1"]},
    {"command": ["serve", "--header", "Authorization: Bearer canary-1.0123456789abc"]},
    {"headers": {"X-Api-Key": "canary-1", "Authorization": "canary-2"}},
    {"url": "https://judge/v1?version=2&api_key=canary-1"},
    {"models.judge.args.key": "canary-1"},
])  # fmt: skip
def test_secrets_in_lines_of_shells_and_in_options_and_headers_are_redacted(secret):
    redacted = repr(Redactor({}).value(secret))
    assert "canary" not in redacted
    assert "<redacted>" in redacted


def test_what_is_no_secret_is_shown():
    shown = {
        "setup": ["export NCCL_DEBUG=WARN", "export MAX_TOKENS=512", "ulimit -n 4096"],
        "command": ["serve", "--tokenizer", "gpt2", "--max-tokens=512", "-x"],
        "prompt": "x = y; key=2 & bearer bonds?", "url": "http://judge/v1?model=small",
    }  # fmt: skip
    assert Redactor({}).value(shown) == shown


def test_small_numbers_of_the_recipe_are_numbers(tmp_path):
    recipe = RECIPE + "optimizer: {lr: 1e-06, note: '$${literal}'}\n"
    settings = describe_run(make_run(tmp_path / "run", recipe=recipe).path, Redactor({})).settings
    assert settings["optimizer.lr"] == 1e-6
    assert settings["optimizer.note"] == "${literal}"


@pytest.mark.parametrize("recipe", [
    "[toy]", "name: [toy]\nlog: {}", "name: toy\nlog: 1",
    "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmn")),
])  # fmt: skip
def test_the_recipe_of_a_strangers_run_is_refused(tmp_path, recipe):
    run = make_run(tmp_path / "run", recipe=recipe)
    with pytest.raises(RlcliError) as caught:
        describe_run(run.path, Redactor({}))
    assert caught.value.exit_code in (2, 6)


def test_runs_that_differ_in_their_seed_are_one_group(tmp_path):
    redactor = Redactor({})
    texts = {
        "one": RECIPE,
        "two": RECIPE.replace("seed: 1", "seed: 2"),
        "other": RECIPE.replace("steps: 4", "steps: 5"),
    }
    runs = {
        name: describe_run(make_run(tmp_path / name, recipe=text).path, redactor)
        for name, text in texts.items()
    }
    assert runs["one"].group == runs["two"].group != runs["other"].group
    assert (runs["one"].name, runs["one"].project, runs["one"].tags) == ("toy/one", "toy", ())


def test_a_run_of_a_sweep_names_it(tmp_path):
    folder = tmp_path / "20261127-100000"
    run = make_run(folder / "01-lr-0.1", recipe=RECIPE.replace("null}", "studies}"))
    (folder / "sweep.json").write_text("{}")
    described = describe_run(run.path, Redactor({}))
    assert described.name == "toy/20261127-100000/01-lr-0.1"
    assert (described.project, described.tags) == ("studies", ("sweep:20261127-100000",))


def test_a_run_whose_id_was_forged_is_refused(tmp_path):
    run = make_run(tmp_path / "run", [1])
    for name in ("status.json", "committed.json"):
        text = (run.path / name).read_text()
        (run.path / name).write_text(text.replace(run.run_id, "../../elsewhere"))
    with pytest.raises(ResourceError, match="is not the id of a run"):
        describe_run(run.path, Redactor({}))


# -- the trackers ----------------------------------------------------------------------------------


def test_every_tracker_of_recipes_has_a_class_an_extra_and_an_option():
    names = set(get_args(Tracker))
    assert names == set(CLASSES) == {str(name) for name in track.TrackerName} == set(TRACKERS)
    assert names - {"tensorboard"} <= set(read_requirements().extras)


def in_tensorboard(folder: Path) -> Path:
    """The folder of TensorBoard's files, with everything that the run has written."""
    following = Mirror(folder, "tensorboard")
    following.open()
    following.close()
    return folder / "tensorboard"


def test_tensorboard_has_every_number_once(tmp_path):
    run = make_run(tmp_path / "run", [1, 2])
    scalars = tensorboard_scalars(in_tensorboard(run.path))
    expected = numbers_of(read_metrics(run.metrics))
    assert repr(sorted(scalars)) == repr(sorted((*key, value) for key, value in expected.items()))


def test_files_of_the_same_second_are_two_and_in_order(tmp_path, monkeypatch):
    clock = SimpleNamespace(time=lambda: 1_800_000_000.0)
    monkeypatch.setattr("tensorboardX.event_file_writer.time", clock)
    run = make_run(tmp_path / "run", [1, 2])
    in_tensorboard(run.path)
    add_steps(run.path, [3])
    scalars = tensorboard_scalars(in_tensorboard(run.path))
    times = [step for step, tag, _ in scalars if tag == "time/step"]
    assert times == [1, 2, 3]


def test_tensorboard_shows_samples_as_they_are(tmp_path):
    run = make_run(tmp_path / "run")
    line = '{"step": 2, "id": 9, "prompt": "<b>|", "response": "[x](http://e) <script>\\n`"}\n'
    run.samples.write_text(line)
    (text,) = (
        value.tensor.string_val[0].decode()
        for event in tensorboard_events(in_tensorboard(run.path))
        for value in event.summary.value
        if value.tag == "samples/train"
    )
    assert "&#60;script&#62;<br>&#96;" in text
    assert not set("<[`") & set(text.replace("<br>", ""))


def test_tensorboard_forgets_the_steps_that_a_run_repeats(tmp_path):
    run = make_run(tmp_path / "run", [1, 2, 3])
    for steps in ((), (3, 4)):
        add_steps(run.path, steps, attempt=1)
        in_tensorboard(run.path)
        run.forget_after(2)
    add_steps(run.path, [3], attempt=2)
    scalars = tensorboard_scalars(in_tensorboard(run.path))
    times = [(step, value) for step, tag, value in scalars if tag == "time/step"]
    assert times == [(1, 0.5), (2, 0.5), (3, 2.5)]
    starts = [e for e in tensorboard_events(run.path / "tensorboard") if e.HasField("session_log")]
    assert len(starts) == 1, "the event that makes an open TensorBoard drop what it has read"


def test_writing_for_tensorboard_does_not_load_torch(tmp_path):
    run = make_run(tmp_path / "run", [1])
    script = (
        "import sys; from pathlib import Path; from rlcli.observe.trackers.mirror import Mirror\n"
        "mirror = Mirror(Path(sys.argv[1]), 'tensorboard'); mirror.open(); mirror.close()\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "False\n", done.stderr


def test_missing_libraries_are_said_when_a_tracker_is_opened(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    run = make_run(tmp_path / "run", [1])
    with pytest.raises(ImportError):
        Mirror(run.path, "tensorboard").open()
