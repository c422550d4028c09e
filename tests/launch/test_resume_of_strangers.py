"""Whose code a resumed run may run: not that of a project which another user has put where anybody
may write."""

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
from rlcli.launch.resume import resume_run
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.observe.group_comparison import groups_of
from rlcli.observe.results import find_result
from rlcli.observe.run_overview import read_overview
from rlcli.owned_folder import OwnedFolder
from rlcli.recipe.resolve import load_recipe

STRANGER = 12345


@pytest.fixture
def give_to_stranger(monkeypatch):
    """Give a folder and its content to another user: really as root,
    otherwise by faking the reported owner."""
    folders, owner = [], projects._owner
    monkeypatch.setattr(
        projects,
        "_owner",
        lambda file: (
            STRANGER if any(file.is_relative_to(folder) for folder in folders) else owner(file)
        ),
    )

    def give(folder):
        if os.getuid() == 0:
            for path in (folder, *folder.rglob("*")):
                os.lchown(path, STRANGER, STRANGER)
        else:
            folders.append(folder.resolve())

    return give


@pytest.fixture
def shared_folder(tmp_path):
    """A folder in which anybody may write, like /tmp."""
    folder = tmp_path / "everybody"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def trained(project, components, monkeypatch, shared_folder):
    """A run in our own folder, whose project is named by its environment.json alone."""
    with PlainDisplay(sys.stderr) as display:
        run_recipe(load_recipe("toy.yaml", ["train.steps=1"]), project / "run", display)
    monkeypatch.delenv("RLCLI_PROJECT")
    # for later: a process imports a component once
    home = shutil.copytree(components, shared_folder / "project")
    environment = project / "run/environment.json"
    record = json.loads(environment.read_text())
    assert record["variables"]["RLCLI_PROJECT"] == str(components)
    environment.write_text(json.dumps(record | {"variables": {"RLCLI_PROJECT": str(home)}}))
    return project / "run"


def resume(run, *overrides):
    with PlainDisplay(sys.stderr) as display:
        return resume_run(run, overrides, display)


def test_the_users_own_project_is_used_wherever_it_is(trained):
    assert resume(trained).longer


def test_a_project_planted_by_another_user_is_refused(
    trained, shared_folder, give_to_stranger, monkeypatch
):
    home = shared_folder / "project"
    give_to_stranger(home)
    before = (trained / "status.json").read_bytes()
    with pytest.raises(ProjectError) as caught:
        resume(trained, "train.steps=2")
    assert caught.value.where == str(home)
    assert f"--project {home} resume" in caught.value.hint
    with pytest.raises(ProjectError) as caught:
        find_exam(None, trained)
    assert f"--project {home} eval" in caught.value.hint
    assert (trained / "status.json").read_bytes() == before
    assert "RLCLI_PROJECT" not in os.environ
    monkeypatch.setenv("RLCLI_PROJECT", str(home))  # what --project does
    assert resume(trained).longer


def test_a_run_planted_by_another_user_is_refused(
    trained, shared_folder, components, give_to_stranger, monkeypatch, tmp_path
):
    run = shutil.copytree(trained, shared_folder / "run")
    record = json.loads((run / "environment.json").read_text())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    record |= {"variables": {"RLCLI_PROJECT": str(components)}, "working_directory": str(elsewhere)}
    (run / "environment.json").write_text(json.dumps(record))
    give_to_stranger(run)
    with pytest.raises(ProjectError, match="another user") as caught:
        resume(run)
    assert caught.value.where == str(run)
    assert f"--project PROJECT resume {run}" in caught.value.hint
    monkeypatch.setenv("RLCLI_PROJECT", str(components))
    assert resume(run).longer


def test_a_file_planted_by_another_user_in_a_run_is_refused(trained, give_to_stranger):
    trained.chmod(0o777)
    (trained / "environment.json").rename(trained / "theirs")
    (trained / "environment.json").write_text("{}")
    if os.getuid() == 0:
        os.chown(trained / "environment.json", STRANGER, STRANGER)
    else:
        give_to_stranger(trained / "environment.json")
    with pytest.raises(ProjectError) as caught:
        resume(trained)
    assert caught.value.where == str(trained / "environment.json")


def test_a_result_planted_by_another_user_is_not_used_as_a_start(
    project, shared_folder, give_to_stranger, caplog
):
    resolved = load_recipe("toy.yaml", ["train.steps=1", f"log.dir={shared_folder}"])
    with PlainDisplay(sys.stderr) as display:
        folder = run_recipe(resolved, None, display).outcome.run_dir
    assert find_result(resolved, str(shared_folder), "actor") == folder / "models/actor"
    give_to_stranger(shared_folder / "toy")
    assert find_result(resolved, str(shared_folder), "actor") is None
    assert "another user" in caplog.text


@pytest.mark.parametrize("name", ["worker.json", "logs/node0.log"])
def test_a_link_instead_of_a_file_of_the_run_is_not_followed(
    trained, tmp_path, monkeypatch, shared_folder, name
):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (trained / name).parent.mkdir(exist_ok=True)
    (trained / name).symlink_to(precious)
    with pytest.raises(ResourceError) as caught:
        resume(trained, "train.steps=2", "launch=local", "cluster.devices_per_node=2")
    assert (caught.value.code, caught.value.where) == ("F75", str(trained / name))
    assert precious.read_text() == "mine"
    meeting_folders = [
        candidate for candidate in gc.get_objects() if isinstance(candidate, OwnedFolder)
    ]
    assert not [folder.path for folder in meeting_folders if folder.path.exists()]


def test_the_exam_of_a_run_planted_by_another_user_is_refused(
    trained, shared_folder, components, give_to_stranger, monkeypatch
):
    run = shutil.copytree(trained, shared_folder / "run")
    give_to_stranger(run)
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


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "ledger.jsonl", "resumes.jsonl", "recipe.digest", "README.md"]
)
def test_a_pipe_instead_of_a_file_of_the_run_does_not_block(own_run, name):
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


def test_a_digest_that_is_not_text_does_not_prevent_resuming(own_run):
    (own_run / "recipe.digest").write_bytes(b"\xff\x00")
    resume(own_run, "train.steps=3")
    assert len((own_run / "recipe.digest").read_text().strip()) == 64


def test_missing_records_are_reported_when_resuming(own_run, capsys):
    (own_run / "metrics.jsonl").unlink()
    (own_run / "ledger.jsonl").unlink()
    resume(own_run, "train.steps=3")
    assert "metrics.jsonl and ledger.jsonl of steps 1 to 1: missing" in capsys.readouterr().err
