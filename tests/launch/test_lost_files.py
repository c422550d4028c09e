"""Runs of which files are lost or damaged: resumed with what is left, or refused, and never
silently started over."""

import json
import shutil
import sys

import pytest
from run_files import files, numbers

from rlcli.errors import ModelError, ResourceError
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.observe.results import find_result
from rlcli.observe.run_directory import RunDirectory
from rlcli.recipe.resolve import load_recipe

pytestmark = pytest.mark.timeout(420)  # some are several runs

LONG = ("train.steps=5", "checkpoint.every_steps=2")


def test_a_damaged_checkpoint_is_skipped(train, resume, project, capsys):
    _, uninterrupted = train(*LONG, name="whole")
    train("train.steps=4", "checkpoint.every_steps=2")
    damaged = project / "run/checkpoints/step-000000000004/state.json"
    damaged.write_bytes(damaged.read_bytes()[:-2])
    resumed = resume("train.steps=5")
    assert resumed.step == 2
    assert "[F17]" in capsys.readouterr().err
    assert numbers(project / "run") == numbers(uninterrupted)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damaged", ["models/actor", "state.json"])
def test_a_flipped_bit_is_detected_before_anything_is_loaded(
    train, resume, project, capsys, damaged
):
    _, uninterrupted = train(*LONG, name="whole")
    train("train.steps=4", "checkpoint.every_steps=2")
    path = project / "run/checkpoints/step-000000000004" / damaged
    flip_a_bit(next(path.glob("*.safetensors")) if path.is_dir() else path)
    resumed = resume("train.steps=5")
    assert resumed.step == 2
    assert f"[F18] {path}" in capsys.readouterr().err
    assert numbers(project / "run") == numbers(uninterrupted)
    last = json.loads((project / "run/resumes.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2


def test_a_run_whose_only_checkpoint_is_damaged_is_refused_and_unchanged(train, resume, project):
    train("train.steps=2", "checkpoint.every_steps=2")
    model = project / "run/checkpoints/step-000000000002/models/actor"
    flip_a_bit(next(model.glob("*.safetensors")))
    before = files(project / "run")
    with pytest.raises(ModelError, match="no checkpoint is intact") as raised:
        resume("train.steps=5")
    assert raised.value.code == "F18"
    assert files(project / "run") == before


def lose_folder(run):
    shutil.rmtree(run / "checkpoints")


def lose_content(run):
    for checkpoint in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)


def lose_all_but_the_record(run):
    lose_folder(run)
    for name in ("status.json", "ledger.jsonl", "metrics.jsonl"):
        (run / name).unlink()


def lose_the_record_too(run):
    lose_content(run)
    (run / "committed.json").unlink()


def lose_folder_and_record(run):
    lose_folder(run)
    (run / "committed.json").unlink()


def garble_the_record(run):
    lose_folder(run)
    (run / "committed.json").write_text("{")


@pytest.mark.parametrize(
    "lose",
    [
        lose_folder,
        lose_content,
        lose_all_but_the_record,
        lose_the_record_too,
        lose_folder_and_record,
        garble_the_record,
    ],
)
def test_a_run_whose_checkpoints_are_gone_does_not_start_over(train, resume, project, lose):
    train("train.steps=2")
    lose(project / "run")
    before = files(project / "run")
    with pytest.raises(ModelError) as caught:
        resume("train.steps=3")
    assert (caught.value.code, caught.value.exit_code) == ("F21", 5)
    assert "rlcli train" in caught.value.hint
    assert files(project / "run") == before


def test_starting_over_as_the_hint_says_gives_the_same_run(train, resume, project):
    train("train.steps=2")
    lose_folder(project / "run")
    with pytest.raises(ModelError) as caught:
        resume()
    recipe = caught.value.hint.rpartition(" ")[2]
    with PlainDisplay(sys.stderr) as display:
        run_recipe(load_recipe(recipe), project / "again", display)
    assert numbers(project / "again") == numbers(project / "run")


def test_a_missing_last_checkpoint_is_reported_and_the_one_before_is_used(
    train, resume, project, capsys
):
    _, uninterrupted = train(*LONG, name="whole")
    train("train.steps=4", "checkpoint.every_steps=2")
    shutil.rmtree(project / "run/checkpoints/step-000000000004")
    capsys.readouterr()
    assert resume("train.steps=5").step == 2
    messages = capsys.readouterr().err
    assert "the last checkpoint, of step 4, is missing" in messages
    assert "metrics.jsonl: 2 lines of steps 3 to 4 dropped" in messages
    assert numbers(project / "run") == numbers(uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize(
    "status", [None, "", '{"state": "running", "st', "[]", '{"run_id": 3, "state": "done"}']
)
def test_a_run_without_a_readable_status_is_resumed(train, resume, project, caplog, status):
    _, uninterrupted = train("train.steps=3", name="whole")
    train("train.steps=2")
    file = project / "run/status.json"
    run_id = json.loads(file.read_text())["run_id"]
    file.unlink() if status is None else file.write_text(status)
    assert resume().longer
    assert ("is missing" if status is None else "cannot be read") in caplog.text
    assert resume("train.steps=3").finished.exit_code == 0
    assert numbers(project / "run") == numbers(uninterrupted)
    assert json.loads(file.read_text())["run_id"] == run_id


def test_a_result_is_found_without_its_status(project, caplog):
    resolved = load_recipe("toy.yaml", ["train.steps=1"])
    with PlainDisplay(sys.stderr) as display:
        folder = run_recipe(resolved, None, display).outcome.run_dir
    model = find_result(resolved, "runs", "actor")
    assert model == folder / "models/actor"
    (folder / "status.json").unlink()
    assert find_result(resolved, "runs", "actor") == model
    assert "done, step 1 is committed" in caplog.text
    (folder / "committed.json").unlink()  # nothing says that its models are complete
    assert find_result(resolved, "runs", "actor") is None


def test_a_missing_recipe_is_reported_as_an_empty_run_only_before_training(train, resume, project):
    RunDirectory.create(project / "run", "toy").close()
    with pytest.raises(ResourceError, match="holds no run yet"):
        resume()
    shutil.rmtree(project / "run")
    train("train.steps=1")
    (project / "run/recipe.resolved.yaml").unlink()
    with pytest.raises(ResourceError, match="the run needs it") as caught:
        resume()
    assert "put it back" in caught.value.hint


def test_a_missing_digest_is_written_again(train, resume, project):
    train("train.steps=1")
    (project / "run/recipe.digest").unlink()
    assert resume("train.steps=2").finished.steps_done == 2


def test_a_folder_without_a_run_is_refused(resume, project):
    (project / "empty").mkdir()
    with pytest.raises(ResourceError) as caught:
        resume(name="empty")
    assert caught.value.code == "F72"
