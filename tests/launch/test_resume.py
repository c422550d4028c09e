"""Going on with a run: the same numbers as without the interruption, and a clear word where that cannot be."""

import json
import shutil
import sys

import pytest

from rlcli.errors import DataError, ResourceError, UsageError, WorkerError
from rlcli.launch.resume import resume_run
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe

TWO_RANKS = ("launch=local", "cluster.devices_per_node=2")
LONG = ("train.steps=5", "checkpoint.every_steps=2")


@pytest.fixture
def train(project):
    def run(*overrides, name="run"):
        with PlainDisplay(sys.stderr) as display:
            return run_recipe(load_recipe("toy.yaml", overrides), project / name, display), project / name

    return run


@pytest.fixture
def resume(project):
    def run(*overrides, name="run", accept=False):
        with PlainDisplay(sys.stderr) as display:
            return resume_run(project / name, overrides, display, accept_changes=accept)

    return run


def numbers(folder):
    """The records of a run, without what a clock says; `calls` counts the steps of a process, not of a run."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time/", "tokens_per_second")
    return [
        {key: value for key, value in record.items() if not key.startswith(clocks) and not key.endswith("/calls")}
        for record in records
    ]


def checkpoints(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def ledger(folder):
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def test_a_prolonged_run_is_the_long_run(train, resume):
    _, whole = train(*LONG, name="whole")
    train("train.steps=2")
    resumed = resume("train.steps=5")
    folder = whole.parent / "run"
    assert resumed.finished.exit_code == 0
    assert numbers(folder) == numbers(whole)
    assert (folder / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert ledger(folder) == ledger(whole)


def test_no_sample_is_trained_on_twice_in_an_epoch(train):
    _, folder = train("train.steps=5")  # 20 rows, 8 a step: two epochs
    taken = [sample for line in ledger(folder) for sample in line["samples"]]
    assert len(taken) == len(set(taken)) == 40
    assert {sample.partition("r")[0] for sample in taken} == {"e0", "e1"}


def test_old_checkpoints_are_cleared_away(train):
    _, folder = train("train.steps=5", "checkpoint.every_steps=1", "checkpoint.keep_last=2")
    assert checkpoints(folder) == [4, 5]


def test_the_best_checkpoint_stays(train):
    settings = ("checkpoint.every_steps=1", "checkpoint.keep_last=1", "checkpoint.keep_best=1")
    _, folder = train("train.steps=4", *settings, "checkpoint.best_metric=actor/loss", "checkpoint.best_is=lowest")
    assert checkpoints(folder) == [1, 4]


def test_a_dead_rank_costs_the_steps_since_the_last_checkpoint(train, resume, project, capsys):
    kill = "graph.train_actor.interface.args.kill_rank=1"
    _, whole = train(*TWO_RANKS, "train.steps=3", name="whole")
    with pytest.raises(WorkerError):
        train(*TWO_RANKS, "train.steps=3", "checkpoint.every_steps=1", "checkpoint.asynchronous=false", kill)
    assert checkpoints(project / "run") == [1]
    resume("graph.train_actor.interface.args.kill_rank=-1", accept=True)
    assert numbers(project / "run") == numbers(whole)
    assert "resuming after step 1" in capsys.readouterr().err


def test_dead_ranks_are_started_again_as_often_as_the_recipe_allows(train, capsys):
    settings = (*TWO_RANKS, "train.steps=3", "checkpoint.every_steps=1", "checkpoint.asynchronous=false")
    _, whole = train(*settings, name="whole")
    # every start dies in its second step, so each gets one step further
    kill = "graph.train_actor.interface.args.kill_rank=1"
    finished, folder = train(*settings, kill, "launch.max_restarts=2")
    assert finished.exit_code == 0
    assert numbers(folder) == numbers(whole)
    assert "starting again" in capsys.readouterr().err


def test_on_another_number_of_ranks(train, resume, project, capsys):
    _, whole = train(*LONG, name="whole")
    train("train.steps=2")
    resume("train.steps=5", *TWO_RANKS)
    assert numbers(project / "run") == numbers(whole)
    assert "saved on 1 ranks, going on with 2" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over(train, resume, project, capsys):
    _, whole = train(*LONG, name="whole")
    train("train.steps=4", "checkpoint.every_steps=2")
    damaged = project / "run/checkpoints/step-000000000004/state.json"
    damaged.write_bytes(damaged.read_bytes()[:-2])
    resumed = resume("train.steps=5")
    assert resumed.step == 2
    assert "[F17]" in capsys.readouterr().err
    assert numbers(project / "run") == numbers(whole)


def test_without_a_checkpoint_a_run_begins_anew(train, resume, project):
    _, whole = train("train.steps=2", name="whole")
    train("train.steps=2")
    shutil.rmtree(project / "run/checkpoints")
    run_id = json.loads((project / "run/status.json").read_text())["run_id"]
    (project / "run/status.json").write_text(json.dumps({"run_id": run_id, "state": "running", "step": 1}))
    assert resume().step == 0
    assert numbers(project / "run") == numbers(whole)
    assert json.loads((project / "run/status.json").read_text())["run_id"] == run_id


def test_a_run_that_is_done_stays_as_it_is(train, resume, project):
    train("train.steps=2")
    before = (project / "run/metrics.jsonl").read_bytes()
    assert resume().finished is None
    assert (project / "run/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "accept"),
    [("seed=6", False), ("seed=6", True), ("train.prompts_per_step=4", False), ("train.shuffle=false", True)],
)
def test_a_change_that_alters_the_run_is_refused(train, resume, change, accept):
    train("train.steps=2")
    with pytest.raises(UsageError) as caught:
        resume("train.steps=3", change, accept=accept)
    assert caught.value.code == "F84"
    assert change.partition("=")[0] in caught.value.what


def test_a_smaller_step_goes_on_where_the_data_were_left(train, resume, project):
    train("train.steps=2")
    resume("train.steps=4", "train.prompts_per_step=2", accept=True)
    taken = [sample for line in ledger(project / "run") for sample in line["samples"]]
    assert len(taken) == len(set(taken)) == 8 + 8 + 2 + 2


def test_a_run_of_epochs_that_is_done_stays_as_it_is(train, resume, project):
    train("train.steps=null", "train.epochs=1")
    before = (project / "run/metrics.jsonl").read_bytes()
    assert resume().finished is None
    assert (project / "run/metrics.jsonl").read_bytes() == before
    assert resume("train.epochs=2").finished.steps_done == 5  # 20 rows twice, 8 a step


def test_an_end_that_lies_behind_is_refused(train, resume):
    train("train.steps=2")
    with pytest.raises(UsageError) as caught:
        resume("train.steps=1")
    assert caught.value.code == "F84"


def test_another_recipe_is_found_from_where_the_user_is(train, project, monkeypatch):
    train("train.steps=2")
    elsewhere = project / "elsewhere"
    elsewhere.mkdir()
    longer = (project / "toy.yaml").read_text().replace("steps: 3", "steps: 4")
    (elsewhere / "longer.yaml").write_text("name: toy\n" + longer)
    monkeypatch.chdir(elsewhere)
    with PlainDisplay(sys.stderr) as display:
        resumed = resume_run(project / "run", (), display, recipe_file="longer.yaml")
    assert resumed.finished.steps_done == 4


def test_other_training_data_are_refused(train, resume):
    train("train.steps=2")
    with pytest.raises(DataError) as caught:
        resume("train.steps=3", "datasets.train.args.rows=21", accept=True)
    assert caught.value.code == "F65"


def test_a_folder_that_holds_no_run_is_refused(resume, project):
    (project / "empty").mkdir()
    with pytest.raises(ResourceError) as caught:
        resume(name="empty")
    assert caught.value.code == "F72"


def test_a_first_start_in_a_used_folder_is_refused_with_the_way_on(train):
    train("train.steps=1")
    with pytest.raises(ResourceError) as caught:
        train("train.steps=2")
    assert "rlcli resume" in caught.value.hint
