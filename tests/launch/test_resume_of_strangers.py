"""Whose code a resumed run may run: not that of a project which another user has put where anybody may write."""

import contextlib
import gc
import json
import os
import shutil
import sys

import pytest

from rlcli import project as projects
from rlcli.errors import ProjectError, ResourceError, RlcliError, UsageError
from rlcli.launch.evaluation import find_exam
from rlcli.launch.meeting import MeetingFolder
from rlcli.launch.resume import resume_run
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.observe.group_comparison import groups_of
from rlcli.observe.results import find_result
from rlcli.observe.run_overview import read_overview
from rlcli.recipe.resolve import load_recipe

STRANGER = 12345


@pytest.fixture
def give_away(monkeypatch):
    """Make a folder, and all that it holds, another user's: really where we may, else by the owner that is reported."""
    given, owner = [], projects._owner
    monkeypatch.setattr(
        projects, "_owner", lambda file: STRANGER if any(file.is_relative_to(one) for one in given) else owner(file)
    )

    def give(folder):
        if os.getuid() == 0:
            for path in (folder, *folder.rglob("*")):
                os.lchown(path, STRANGER, STRANGER)
        else:
            given.append(folder.resolve())

    return give


@pytest.fixture
def everybody(tmp_path):
    """Like /tmp."""
    folder = tmp_path / "everybody"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def trained(project, components, monkeypatch, everybody):
    """A run in our own folder, whose project is named by its environment.json alone."""
    with PlainDisplay(sys.stderr) as display:
        run_recipe(load_recipe("toy.yaml", ["train.steps=1"]), project / "run", display)
    monkeypatch.delenv("RLCLI_PROJECT")
    home = shutil.copytree(components, everybody / "project")  # for later: a process imports a component once
    environment = project / "run/environment.json"
    told = json.loads(environment.read_text())
    assert told["variables"]["RLCLI_PROJECT"] == str(components)
    environment.write_text(json.dumps(told | {"variables": {"RLCLI_PROJECT": str(home)}}))
    return project / "run"


def resume(run, *overrides):
    with PlainDisplay(sys.stderr) as display:
        return resume_run(run, overrides, display)


def test_ones_own_project_is_used_wherever_it_is(trained):
    assert resume(trained).longer


def test_a_project_that_another_has_planted_is_refused(trained, everybody, give_away, monkeypatch):
    home = everybody / "project"
    give_away(home)
    before = (trained / "status.json").read_bytes()
    with pytest.raises(ProjectError) as caught:
        resume(trained, "train.steps=2")
    assert caught.value.where == str(home)
    assert f"--project {home} resume" in caught.value.hint
    assert (trained / "status.json").read_bytes() == before
    assert "RLCLI_PROJECT" not in os.environ
    monkeypatch.setenv("RLCLI_PROJECT", str(home))  # what --project does
    assert resume(trained).longer


def test_a_run_that_another_has_planted_is_refused(trained, everybody, components, give_away, monkeypatch, tmp_path):
    run = shutil.copytree(trained, everybody / "run")
    told = json.loads((run / "environment.json").read_text())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    told |= {"variables": {"RLCLI_PROJECT": str(components)}, "working_directory": str(elsewhere)}
    (run / "environment.json").write_text(json.dumps(told))
    give_away(run)
    with pytest.raises(ProjectError, match="another user") as caught:
        resume(run)
    assert caught.value.where == str(run)
    assert f"--project PROJECT resume {run}" in caught.value.hint
    monkeypatch.setenv("RLCLI_PROJECT", str(components))
    assert resume(run).longer


def test_a_file_that_another_has_planted_in_ones_run_is_refused(trained, give_away):
    trained.chmod(0o777)
    (trained / "environment.json").rename(trained / "theirs")
    (trained / "environment.json").write_text("{}")
    if os.getuid() == 0:
        os.chown(trained / "environment.json", STRANGER, STRANGER)
    else:
        give_away(trained / "environment.json")
    with pytest.raises(ProjectError) as caught:
        resume(trained)
    assert caught.value.where == str(trained / "environment.json")


def test_a_result_that_another_has_planted_is_not_started_from(project, everybody, give_away, caplog):
    resolved = load_recipe("toy.yaml", ["train.steps=1", f"log.dir={everybody}"])
    with PlainDisplay(sys.stderr) as display:
        folder = run_recipe(resolved, None, display).outcome.run_dir
    assert find_result(resolved, str(everybody), "actor") == folder / "models/actor"
    give_away(everybody / "toy")
    assert find_result(resolved, str(everybody), "actor") is None
    assert "another user" in caplog.text


@pytest.mark.parametrize("name", ["worker.json", "logs/node0.log"])
def test_a_link_in_the_place_of_a_file_of_the_run_leads_nowhere(trained, tmp_path, monkeypatch, everybody, name):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (trained / name).parent.mkdir(exist_ok=True)
    (trained / name).symlink_to(precious)
    with pytest.raises(ResourceError) as caught:
        resume(trained, "train.steps=2", "launch=local", "cluster.devices_per_node=2")
    assert (caught.value.code, caught.value.where) == ("F75", str(trained / name))
    assert precious.read_text() == "mine"
    met = [thing for thing in gc.get_objects() if isinstance(thing, MeetingFolder)]
    assert not [folder.path for folder in met if folder.path.exists()]


def test_the_exam_of_a_run_that_another_has_planted_is_refused(trained, everybody, components, give_away, monkeypatch):
    run = shutil.copytree(trained, everybody / "run")
    give_away(run)
    with pytest.raises(ProjectError, match="another user") as caught:
        find_exam(None, run)
    assert f"--project PROJECT eval {run}" in caught.value.hint
    monkeypatch.setenv("RLCLI_PROJECT", str(components))
    with contextlib.suppress(UsageError):  # the recipe of the test evaluates nothing
        find_exam(None, run)


@pytest.fixture
def own_run(trained, components, monkeypatch):
    """A run that can be continued in this process."""
    monkeypatch.setenv("RLCLI_PROJECT", str(components))
    return trained


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "resumes.jsonl", "recipe.digest", "README.md"])
def test_a_pipe_in_the_place_of_a_file_of_the_run_is_never_waited_for(own_run, name):
    (own_run / name).unlink(missing_ok=True)
    os.mkfifo(own_run / name)
    read_overview(own_run)
    with contextlib.suppress(RlcliError):
        groups_of([own_run])
    if name in ("metrics.jsonl", "ledger.jsonl", "resumes.jsonl"):
        with pytest.raises(ResourceError):
            resume(own_run, "train.steps=3")
    else:
        resume(own_run, "train.steps=3")


def test_a_digest_that_is_no_text_does_not_keep_a_run_from_continuing(own_run):
    (own_run / "recipe.digest").write_bytes(b"\xff\x00")
    resume(own_run, "train.steps=3")
    assert len((own_run / "recipe.digest").read_text().strip()) == 64


def test_records_that_are_not_there_are_mentioned(own_run, capsys):
    (own_run / "metrics.jsonl").unlink()
    (own_run / "ledger.jsonl").unlink()
    resume(own_run, "train.steps=3")
    assert "metrics.jsonl and ledger.jsonl of steps 1 to 1: not there" in capsys.readouterr().err
