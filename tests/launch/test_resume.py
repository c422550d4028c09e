"""A resumed run: the same numbers as without the interruption,
and a clear error where that is impossible."""

import json
import os
import sys
from pathlib import Path

import pytest
from run_files import checkpoints, files, ledger, numbers

from rlcli.checkpoint.manifest import read_manifest
from rlcli.cli.main import main
from rlcli.errors import DataError, ResourceError, UsageError, WorkerError
from rlcli.launch.resume import resume_run
from rlcli.observe.display import PlainDisplay
from rlcli.observe.run_directory import RunDirectory
from rlcli.recipe import requirements_here
from rlcli.recipe.resolve import load_recipe

pytestmark = pytest.mark.timeout(420)  # some are several runs on several ranks

TWO_RANKS = ("launch=local", "cluster.devices_per_node=2")
LONG = ("train.steps=5", "checkpoint.every_steps=2")


def without_fault(argument):
    """Changes after which no rank is killed or fails any more:
    the recipe has the argument in both calls."""
    return [f"graph.{call}.interface.args.{argument}=-1" for call in ("gen", "train_actor")]


def test_a_resumed_run_equals_the_uninterrupted_run(train, resume):
    _, uninterrupted = train(*LONG, name="whole")
    train("train.steps=2")
    resumed = resume("train.steps=5")
    folder = uninterrupted.parent / "run"
    assert resumed.finished.exit_code == 0
    assert numbers(folder) == numbers(uninterrupted)
    assert (folder / "samples.jsonl").read_text() == (uninterrupted / "samples.jsonl").read_text()
    assert ledger(folder) == ledger(uninterrupted)


def test_the_display_of_a_resumed_run_begins_with_what_is_done(train, resume, capsys):
    train("train.steps=2")
    capsys.readouterr()
    resume("train.steps=3")
    lines = capsys.readouterr().err.splitlines()
    steps = [line.split("  ")[:2] for line in lines if line.startswith("step ")]
    assert [words[0] for words in steps] == ["step 2/3", "step 3/3"]
    assert steps[0][1].startswith("reward ")


@pytest.mark.parametrize("eta", [1.0, 0.5])
def test_the_weights_of_a_role_that_mirrors_another_are_stored_once(train, resume, eta):
    """One that only approaches the other has weights of its own, which are stored."""
    follower = ("models.actor_mirror={init: actor, backend: toy}", "graph.gen.model=actor_mirror")
    follower += (f"graph.train_actor.hooks={{copy_to: actor_mirror, eta: {eta}}}",)
    _, uninterrupted = train(*LONG, *follower, name="whole")
    stored = {path.name for path in uninterrupted.glob("checkpoints/*/models/*")}
    assert stored == {"actor", "critic"} | ({"actor_mirror"} if eta < 1 else set())
    train("train.steps=2", *follower)
    resume("train.steps=5")
    assert numbers(uninterrupted.parent / "run") == numbers(uninterrupted)


def test_a_role_that_no_longer_mirrors_another_continues_with_its_weights(train, resume, project):
    """They are not in the checkpoint; its last step samples with them, as without the change."""
    follower = ("models.actor_mirror={init: actor, backend: toy}", "graph.gen.model=actor_mirror")
    follower += ("graph.train_actor.hooks={copy_to: actor_mirror}",)
    _, unchanged = train("train.steps=3", *follower, name="whole")
    train("train.steps=2", *follower)
    resume("train.steps=3", "graph.train_actor.hooks.eta=0.5", accept=True)
    assert numbers(project / "run") == numbers(unchanged)


def test_whom_a_role_follows_cannot_change(train, resume):
    """A role that follows none is not in a checkpoint: its weights would be those that it started
    with."""
    follower = ("models.actor_mirror={init: actor, backend: toy}", "graph.gen.model=actor_mirror")
    train("train.steps=1", *follower, "graph.train_actor.hooks={copy_to: actor_mirror, eta: 0.5}")
    with pytest.raises(UsageError, match=r"another graph\.train_actor\.hooks\.copy_to") as caught:
        resume("train.steps=2", "graph.train_actor.hooks={_replace_: true}", accept=True)
    assert caught.value.code == "F84"


def test_no_sample_is_trained_on_twice_in_an_epoch(train):
    _, folder = train("train.steps=5")  # 20 rows, 8 a step: two epochs
    taken = [line["sample"] for line in ledger(folder)]
    assert len(taken) == len(set(taken)) == 40
    assert {sample.partition("r")[0] for sample in taken} == {"e0", "e1"}


def test_rows_used_of_each_dataset_of_a_mixture_are_counted_when_resumed(train, resume, project):
    mixed = [
        f"datasets.{name}={{type: toy_rows, args: {{rows: {rows}}}}}"
        for name, rows in (("few", 4), ("many", 9))
    ]
    mixed += [
        "datasets.train={type: mixture, args: {weights: {few: 1, many: 3}}}",
        "train.eval.at_end=false",
    ]
    _, uninterrupted = train("train.steps=4", *mixed, name="whole")
    used = [
        (line["used/few"], line["used/many"])
        for line in numbers(uninterrupted)
        if "used/few" in line
    ]
    assert [few + many for few, many in used] == [8, 16, 24, 32]
    assert (used[1], used[3]) == ((4, 12), (8, 24)), "an epoch has 16 rows"
    train("train.steps=3", *mixed)
    resume("train.steps=4")
    assert numbers(project / "run") == numbers(uninterrupted)


def test_only_the_last_checkpoints_are_kept(train):
    _, folder = train("train.steps=5", "checkpoint.every_steps=1", "checkpoint.keep_last=2")
    assert checkpoints(folder) == [4, 5]


def test_a_checkpoint_due_at_the_last_step_is_saved(train):
    _, folder = train("train.steps=4", "checkpoint.every_steps=2", "checkpoint.at_end=false")
    assert checkpoints(folder) == [2, 4]


def test_the_best_checkpoint_is_kept(train):
    settings = ("checkpoint.every_steps=1", "checkpoint.keep_last=1", "checkpoint.keep_best=1")
    _, folder = train(
        "train.steps=4", *settings, "checkpoint.best_metric=actor/loss", "checkpoint.best_is=lowest"
    )
    assert checkpoints(folder) == [1, 4]


@pytest.mark.usefixtures("quick_ranks")
def test_a_dead_rank_costs_the_steps_since_the_last_checkpoint(train, resume, project, capsys):
    kill = "toy.kill_rank=1"
    # two ranks give the numbers of one process
    _, uninterrupted = train("train.steps=3", name="whole")
    with pytest.raises(WorkerError):
        train(
            *TWO_RANKS,
            "train.steps=3",
            "checkpoint.every_steps=1",
            "checkpoint.asynchronous=false",
            kill,
        )
    assert checkpoints(project / "run") == [1]
    resume(*without_fault("kill_rank"), accept=True)
    assert numbers(project / "run") == numbers(uninterrupted)
    assert "resuming after step 1" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_dead_ranks_are_restarted_up_to_the_limit_of_the_recipe(train, capsys):
    settings = ("train.steps=3", "checkpoint.every_steps=1", "checkpoint.asynchronous=false")
    _, uninterrupted = train(*settings, name="whole")  # two ranks give the numbers of one process
    # every start dies in its second step, so each gets one step further
    kill = "toy.kill_rank=1"
    finished, folder = train(*settings, *TWO_RANKS, kill, "launch.max_restarts=2")
    assert finished.exit_code == 0
    assert numbers(folder) == numbers(uninterrupted)
    assert "starting the workers again, restart 2 of 2" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_ranks")
def test_a_run_resumes_on_another_number_of_ranks(train, resume, project, capsys):
    _, uninterrupted = train(*LONG, name="whole")
    train("train.steps=2")
    resume("train.steps=5", *TWO_RANKS)
    assert numbers(project / "run") == numbers(uninterrupted)
    assert "saved on 1 ranks, continuing on 2" in capsys.readouterr().err


def test_a_run_that_died_before_its_first_checkpoint_starts_over(train, resume, project, capsys):
    fail = "toy.fail_rank"
    _, uninterrupted = train("train.steps=2", name="whole")
    with pytest.raises(DataError):
        train("train.steps=2", f"{fail}=0")
    assert [line["step"] for line in numbers(project / "run")] == [0, 1]
    run_id = json.loads((project / "run/status.json").read_text())["run_id"]
    capsys.readouterr()
    assert resume(*without_fault("fail_rank"), accept=True).step == 0
    messages = capsys.readouterr().err
    assert "no checkpoint was committed yet: starting from step 0" in messages
    assert "metrics.jsonl: 2 lines of steps 0 to 1 dropped" in messages
    assert "ledger.jsonl: 8 lines of step 1 dropped" in messages
    assert numbers(project / "run") == numbers(uninterrupted)
    assert json.loads((project / "run/status.json").read_text())["run_id"] == run_id


def test_a_completed_run_without_checkpoints_is_not_trained_again(train, resume, project):
    train("train.steps=2", "checkpoint.at_end=false")
    assert not checkpoints(project / "run")
    before = files(project / "run")
    resumed = resume()
    assert (resumed.step, resumed.finished.steps_done) == (2, 2)
    assert files(project / "run") == before
    with pytest.raises(UsageError, match="has no checkpoint from which it could be continued"):
        resume("train.steps=3")
    assert files(project / "run") == before


def test_a_completed_run_is_over_whatever_step_its_last_checkpoint_is_of(train, resume, project):
    train("train.steps=3", "checkpoint.every_steps=2", "checkpoint.at_end=false")
    before = files(project / "run")
    assert resume().step == 3
    assert files(project / "run") == before
    assert resume("train.steps=4").finished.began_after == 2


def test_resuming_a_completed_run_changes_nothing(train, resume, project):
    train("train.steps=2")
    before = (project / "run/metrics.jsonl").read_bytes()
    assert resume().longer
    assert (project / "run/metrics.jsonl").read_bytes() == before


def paces(folder):
    """Role → the measured argument of its backend, in the resolved recipe of a run."""
    resolved = load_recipe(str(folder / "recipe.resolved.yaml"), ()).recipe
    return {role: resolved.models[role].backend.args.get("pace") for role in ("actor", "critic")}


def test_a_run_keeps_what_it_measured_at_its_first_start(train, project, monkeypatch, capsys):
    monkeypatch.setenv("TOY_SECONDS", '{"walk": 3.0, "run": 2.0}')
    _, folder = train("train.steps=2")
    assert paces(folder) == {"actor": "run", "critic": "run"}
    reason = "measured: 1.5 times as fast as walk"
    assert f"models.actor.backend.args.pace=run ({reason})" in capsys.readouterr().err
    origins = json.loads((folder / "origins.json").read_text())
    assert origins["models.critic.backend.args.pace"] == reason
    monkeypatch.setenv("TOY_SECONDS", '{"walk": 2.0, "run": 3.0}')
    with PlainDisplay(sys.stderr) as display:
        resumed = resume_run(folder, ["train.steps=3"], display, recipe_file="toy.yaml")
    assert resumed.finished.exit_code == 0
    assert [change.key for change in resumed.changes] == ["train.steps"]
    assert paces(folder) == {"actor": "run", "critic": "run"}


@pytest.mark.long
@pytest.mark.usefixtures("quick_ranks")
def test_replaced_ranks_use_what_the_first_ones_measured(train, monkeypatch, capsys):
    monkeypatch.setenv("TOY_SECONDS", '{"walk": 3.0, "run": 2.0}')
    settings = ("train.steps=3", "checkpoint.every_steps=1", "checkpoint.asynchronous=false")
    finished, folder = train(*settings, *TWO_RANKS, "toy.kill_rank=1", "launch.max_restarts=2")
    assert finished.exit_code == 0
    assert capsys.readouterr().err.count("models.actor.backend.args.pace=run") == 1
    assert paces(folder) == {"actor": "run", "critic": "run"}


@pytest.mark.parametrize(
    ("change", "accept"),
    [
        ("seed=6", False),
        ("seed=6", True),
        ("train.prompts_per_step=4", False),
        ("train.shuffle=false", True),
    ],
)
def test_a_change_that_alters_the_run_is_refused(train, resume, change, accept):
    train("train.steps=2")
    with pytest.raises(UsageError) as caught:
        resume("train.steps=3", change, accept=accept)
    assert caught.value.code == "F84"
    assert change.partition("=")[0] in caught.value.what


def test_a_smaller_batch_continues_at_the_same_row(train, resume, project, capsys):
    train("train.steps=2")
    resume("train.steps=4", "train.prompts_per_step=2", accept=True)
    messages = capsys.readouterr().err
    assert "restored  actor weights and optimizer, critic weights and optimizer" in messages
    assert "position 16 in the training data\n  changed   train.steps: 2 → 4\n" in messages
    taken = [line["sample"] for line in ledger(project / "run")]
    assert len(taken) == len(set(taken)) == 8 + 8 + 2 + 2


def test_resuming_a_completed_run_with_json_prints_one_document(train, project, capsys):
    train("train.steps=2")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["resume", "run", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (ended.value.code, document["ok"], document["steps"]) == (0, True, 2)
    assert document["models"]["actor"] == str(project / "run/models/actor")


def test_a_run_stopped_in_its_first_evaluation_does_not_evaluate_twice(
    train, resume, project, monkeypatch
):
    _, uninterrupted = train("train.steps=2", name="whole")
    with monkeypatch.context() as patched:
        patched.setattr(
            PlainDisplay,
            "phase",
            lambda self, text: text == "eval_gen" and os.kill(os.getpid(), 15),
        )
        assert train("train.steps=2")[0].exit_code == 75
    assert checkpoints(project / "run") == [0]
    resume()
    assert numbers(project / "run") == numbers(uninterrupted)
    assert (project / "run/samples.jsonl").read_text() == (
        uninterrupted / "samples.jsonl"
    ).read_text()


def test_a_run_stopped_before_its_first_evaluation_does_it_once_it_is_resumed(
    train, resume, project, monkeypatch
):
    _, uninterrupted = train("train.steps=2", name="whole")
    with monkeypatch.context() as patched:
        patched.setattr(PlainDisplay, "start", lambda *_: os.kill(os.getpid(), 15))
        assert train("train.steps=2")[0].exit_code == 75
    assert (project / "run/metrics.jsonl").read_text() == ""
    assert checkpoints(project / "run") == [0]
    resume()
    assert numbers(project / "run") == numbers(uninterrupted)


def test_a_run_that_ends_where_it_was_stopped_is_evaluated_as_one_of_that_length(
    train, resume, project, monkeypatch
):
    _, short = train("train.steps=1", name="short")
    with monkeypatch.context() as patched:
        patched.setattr(PlainDisplay, "step", lambda *_: os.kill(os.getpid(), 15))
        assert train("train.steps=3")[0].exit_code == 75
    resume("train.steps=1")
    assert "eval/accuracy" in numbers(short)[-1]
    assert numbers(project / "run") == numbers(short)
    of_resumed, of_whole = (
        read_manifest(project / folder / "checkpoints/step-000000000001").metrics
        for folder in ("run", "short")
    )
    assert of_resumed.keys() == of_whole.keys()
    assert of_resumed["eval/accuracy"] == of_whole["eval/accuracy"]
    assert files(project / "run/models") != {}
    before = (project / "run/metrics.jsonl").read_bytes()
    RunDirectory.open(project / "run").write_status("running", 1, 1)  # killed while it was saved
    resume()
    assert (project / "run/metrics.jsonl").read_bytes() == before


def test_the_last_step_is_evaluated_if_it_is_one_of_every_so_many(train):
    _, folder = train("train.steps=2", "train.eval={every_steps: 2, at_end: false}")
    assert ["eval/accuracy" in record for record in numbers(folder)] == [True, False, True]


def test_a_run_killed_right_after_writing_its_recipe_can_be_resumed(
    train, resume, project, monkeypatch
):
    class Killed(BaseException):
        pass

    write_text = RunDirectory.write_text

    def write_and_die(self, relative, text):
        write_text(self, relative, text)
        if str(relative) == "recipe.resolved.yaml":
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "write_text", write_and_die)
        with pytest.raises(Killed):
            train("train.steps=1")
    assert resume().finished.steps_done == 1


def test_resuming_a_completed_run_of_epochs_changes_nothing(train, resume, project):
    train("train.steps=null", "train.epochs=1")
    before = (project / "run/metrics.jsonl").read_bytes()
    assert resume().longer
    assert (project / "run/metrics.jsonl").read_bytes() == before
    assert resume("train.epochs=2").finished.steps_done == 5  # 20 rows twice, 8 a step


def test_changes_of_a_completed_run_are_reported_as_without_effect(train, resume, capsys):
    _, folder = train("train.steps=1")
    resume()
    assert "without effect" not in capsys.readouterr().err
    assert resume("checkpoint.save_dtype=float16", "train.eval.every_steps=5").longer
    changed = "train.eval.every_steps, checkpoint.save_dtype"
    assert f"warning: the run is complete; without effect: {changed}" in capsys.readouterr().err
    assert "float16" not in (folder / "recipe.resolved.yaml").read_text()


@pytest.mark.parametrize("change", [("train.steps=4",), ("train.steps=null", "train.epochs=1")])
def test_an_end_before_the_steps_already_done_is_refused(train, resume, change, capsys):
    _, folder = train("train.steps=5")
    before = files(folder)
    with pytest.raises(UsageError, match="but the run has done 5 steps") as caught:
        resume(*change)
    assert caught.value.code == "F84"
    assert files(folder) == before
    assert "restored" not in capsys.readouterr().err


def test_epochs_are_counted_in_rows_after_the_batch_size_changes(train, resume, project):
    train("train.steps=2")
    epochs = (
        "train.steps=null",
        "train.epochs=2",
        "train.prompts_per_step=4",
        "checkpoint.every_epochs=1",
    )
    # 20 rows twice, 16 of them taken by two steps
    assert resume(*epochs, accept=True).finished.steps_done == 2 + 6
    taken = [line["sample"] for line in ledger(project / "run")]
    assert len(taken) == len(set(taken)) == 40
    assert checkpoints(project / "run") == [3, 8]  # after 20 rows and after 40


def test_another_recipe_is_searched_from_the_working_directory(train, project, monkeypatch):
    train("train.steps=2")
    elsewhere = project / "elsewhere"
    elsewhere.mkdir()
    longer = (project / "toy.yaml").read_text().replace("steps: 3", "steps: 4")
    (elsewhere / "longer.yaml").write_text("name: toy\n" + longer)
    monkeypatch.chdir(elsewhere)
    with PlainDisplay(sys.stderr) as display:
        resumed = resume_run(project / "run", (), display, recipe_file="longer.yaml")
    assert resumed.finished.steps_done == 4
    assert Path.cwd() == elsewhere


def test_changed_training_data_is_refused_and_the_run_is_unchanged(train, resume):
    _, folder = train("train.steps=3", "checkpoint.every_steps=2", "checkpoint.at_end=false")
    before = files(folder)
    with pytest.raises(DataError) as caught:
        resume("train.steps=4", "datasets.train.args.rows=21", accept=True)
    assert caught.value.code == "F65"
    assert files(folder) == before


def test_changed_rows_of_the_evaluation_are_reported(train, resume, capsys):
    evaluation = "datasets.heldout={type: toy_rows, args: {rows: %d}}"
    train("train.steps=2", "train.eval.dataset=heldout", evaluation % 4)
    resume("train.steps=3", evaluation % 4)
    assert "cannot be compared" not in capsys.readouterr().err
    resume("train.steps=4", evaluation % 5, accept=True)
    warning = "heldout has changed since step 3: evaluations cannot be compared with those before"
    assert warning in capsys.readouterr().err


def test_resuming_without_a_needed_library_leaves_the_run_unchanged(
    train, resume, project, monkeypatch
):
    train("train.steps=1")
    before = files(project / "run")
    lacking = ResourceError("backend toy needs a library, which is not installed", code="R75")
    monkeypatch.setattr(requirements_here, "missing_libraries", lambda component: [lacking])
    with pytest.raises(ResourceError, match="needs a library") as error:
        resume("train.steps=2")
    assert error.value.where is not None
    assert files(project / "run") == before


def test_training_into_a_used_folder_is_refused_with_the_command_to_resume(train):
    train("train.steps=1")
    with pytest.raises(ResourceError) as caught:
        train("train.steps=2")
    assert "rlcli resume" in caught.value.hint
