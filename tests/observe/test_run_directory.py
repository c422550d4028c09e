"""The folder of a run: made once, locked by one process, private to its owner,
and never left by a file name."""

import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.errors import ResourceError, UsageError
from rlcli.observe.run_directory import RunDirectory, check_name, check_new_folder
from rlcli.observe.run_record import Committed, read_committed, read_status

HOLDER = """
import sys
from rlcli.observe.run_directory import RunDirectory
run = RunDirectory.create(sys.argv[1], "other")
run.write_text("recipe.resolved.yaml", "")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path):
    with RunDirectory.create(
        tmp_path / "a run", "ppo_math", command=["/bin/rlcli", "train", "my recipe.yaml"]
    ) as run:
        yield run


def test_default_folders_are_named_by_recipe_and_time_and_unique(tmp_path):
    runs = [RunDirectory.create(None, "ppo_math", tmp_path / "runs") for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    for run in runs:
        assert run.path.parent == tmp_path / "runs" / "ppo_math"
        assert re.fullmatch(r"\d{8}-\d{6}(-\d+)?", run.path.name)
        run.close()


def test_all_files_and_folders_are_private_to_the_owner(run, tmp_path):
    previous = os.umask(0)
    try:
        run = RunDirectory.create(tmp_path / "new" / "deep", "ppo_math")
        run.write_text("recipe/base/ppo.yaml", "a: 1\n")
        run.close()
    finally:
        os.umask(previous)
    paths = [run.path, run.path.parent, *run.path.rglob("*")]
    assert len(paths) > 6
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in paths}


def test_the_first_files_record_how_to_repeat_the_run(run):
    assert "rlcli train 'my recipe.yaml'" in run.readme.read_text()
    environment = json.loads(run.environment.read_text())
    assert environment["command"] == ["/bin/rlcli", "train", "my recipe.yaml"]
    assert environment["python"].startswith("3.")
    assert set(environment["packages"]) >= {"torch", "transformers"}
    status = read_status(run.path)
    assert (status["state"], status["step"], status["run_id"]) == ("starting", 0, run.run_id)


def test_status_is_replaced_atomically(run):
    seen, done = [], threading.Event()

    def watch():
        while not done.is_set():
            seen.append(read_status(run.path))

    reader = threading.Thread(target=watch)
    reader.start()
    for step in range(60):
        run.write_status("running", step, 60, message="x" * 5000)
    done.set()
    reader.join()
    assert seen
    assert None not in seen
    run.write_status("failed", 60, 60, exit_code=9, message="nan")
    status = read_status(run.path)
    assert (status["state"], status["exit_code"], status["message"]) == ("failed", 9, "nan")
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]


def test_a_status_on_a_full_disk_is_one_warning(run, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlcli.observe.run_directory.replace_file", full)
    run.write_status("running", 1, 2)
    run.write_status("running", 2, 2)
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text


def test_a_second_process_is_refused_and_the_holder_is_named(tmp_path):
    folder = tmp_path / "held"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ResourceError, match=rf"F71.*pid {holder.pid} on") as refused:
            RunDirectory.create(folder, "ppo_math")
        assert refused.value.exit_code == 6
    finally:
        holder.kill()
        holder.communicate()
    with pytest.raises(ResourceError, match=r"F72.*starting at step 0"):
        # the lock is free at once, the folder is still used
        RunDirectory.create(folder, "ppo_math")


@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "README.md", "my thesis.tex"])
def test_a_folder_with_other_files_is_refused_and_unchanged(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ResourceError, match="F72"):
        RunDirectory.create(tmp_path, "ppo_math")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_that_is_refused_still_names_the_last_process_of_its_run(tmp_path):
    with RunDirectory.create(tmp_path / "run", "toy") as run:
        run.write_text("recipe.resolved.yaml", "name: toy\n")
    lock = run.path / "lock"
    elsewhere = '{"owner": {"host": "node7", "pid": 4711, "started": "1"}, "supervisor": null}\n'
    lock.write_text(elsewhere)
    with pytest.raises(ResourceError, match="F72"):
        check_new_folder(run.path, is_run=True)
    with pytest.raises(ResourceError, match="F72"):
        RunDirectory.create(run.path, "toy")
    assert lock.read_text() == elsewhere


def test_a_folder_with_only_a_free_lock_and_logs_counts_as_empty(tmp_path):
    (tmp_path / "lock").touch()
    (tmp_path / "logs").mkdir()
    RunDirectory.create(tmp_path, "ppo_math").close()
    assert read_status(tmp_path)["state"] == "starting"


def test_a_run_that_died_before_it_had_a_recipe_makes_room_for_another(tmp_path):
    with RunDirectory.create(tmp_path / "run", "toy") as died:
        died.write_text("recipe/toy.yaml", "of the first start")
        with pytest.raises(ResourceError, match="is in use by pid"):
            RunDirectory.create(died.path, "toy")
    with RunDirectory.create(died.path, "toy") as run:
        assert run.run_id != died.run_id
        assert read_committed(run.path) == Committed(run.run_id)
        assert not run.recipe.exists()
        run.write_text("recipe.resolved.yaml", "")
    with pytest.raises(ResourceError, match="holds a run") as refused:
        RunDirectory.create(run.path, "toy")
    assert refused.value.code == "F72"


@pytest.mark.parametrize("call", ["open", "replace", "unlink"])
@pytest.mark.parametrize("writes", [1, 2, 3])
def test_a_run_that_is_killed_while_it_writes_its_first_files_makes_room(tmp_path, call, writes):
    if (child := os.fork()) == 0:
        genuine, calls = getattr(os, call), itertools.count(1)

        def killed(path, *args, **kwargs):
            result = genuine(path, *args, **kwargs)
            is_counted = Path(path).name.startswith((".writable", ".status", ".committed"))
            return os._exit(9) if is_counted and next(calls) == writes else result

        setattr(os, call, killed)
        RunDirectory.create(tmp_path / "run", "toy")
        os._exit(0)
    os.waitpid(child, 0)
    RunDirectory.create(tmp_path / "run", "toy").close()
    assert read_status(tmp_path / "run")["state"] == "starting"


def test_a_file_where_a_folder_should_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="F75") as refused:
        RunDirectory.create(tmp_path / "file" / "run", "ppo_math")
    assert refused.value.hint


def test_an_existing_run_is_opened_without_its_lock(run, tmp_path):
    same = RunDirectory.open(run.path)
    assert same.run_id == run.run_id
    same.write_status("running", 3, 9)
    assert read_status(run.path)["step"] == 3
    with pytest.raises(ResourceError, match="F72"):
        RunDirectory.open(tmp_path / "nothing")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/x", "-rf", "a/b", "CON", "nul.txt", "a.", "x" * 65, "a\n", "é"],
)
def test_names_that_are_not_plain_portable_path_components_are_refused(name):
    with pytest.raises(UsageError, match="R68"):
        check_name(name, "recipe")


@given(st.text(max_size=80))
def test_an_accepted_name_is_a_single_path_component(name):
    try:
        check_name(name, "recipe")
    except UsageError:
        return
    assert Path(name).parts == (name,)
    assert name.isascii()
    assert len(name) <= 64


@pytest.mark.parametrize("relative", ["..", "../x", "recipe/../../x", "/etc/passwd", ".", "link/x"])
def test_no_file_is_written_outside_the_run_folder(run, tmp_path, relative):
    (run.path / "link").symlink_to(tmp_path)
    before = {path for path in tmp_path.rglob("*") if run.path not in path.parents}
    with pytest.raises(UsageError, match="S7"):
        run.write_text(relative, "x")
    assert {path for path in tmp_path.rglob("*") if run.path not in path.parents} == before


def test_the_model_folder_of_a_role_is_inside_the_run_folder(run):
    assert run.model("actor") == run.path / "models" / "actor"
    with pytest.raises(UsageError):
        run.model("../actor")


# -- the run without status.json -------------------------------------------------------------------


def test_the_committed_step_is_recorded_apart_from_the_status(run):
    run.write_status("running", 3, 5)
    assert read_committed(run.path) == Committed(run.run_id)
    run.record.update(step=3)
    run.write_status("done", 5, 5)
    assert read_committed(run.path) == Committed(run.run_id, 3, is_done=True)
    run.write_status("running", 5, 9)
    assert read_committed(run.path) == Committed(run.run_id, 3)
    assert RunDirectory.open(run.path).record.step == 3


@pytest.mark.parametrize(
    "content",
    [None, b"", b"{", b"[]", b"[" * 9999, b"{}", b'{"run_id": "a", "state": "done", "step": -1}'],
)
@pytest.mark.parametrize(
    ("done", "expected"), [(True, ("done", 4, 4)), (False, ("unknown", 4, None))]
)
def test_an_unreadable_status_is_reconstructed_from_the_other_files(
    run, caplog, content, done, expected
):
    run.record.update(step=4, is_done=done)
    run.status.unlink()
    if content is not None:
        run.status.write_bytes(content)
    status = read_status(run.path)
    assert (status["state"], status["step"], status["steps"]) == expected
    assert status["run_id"] == run.run_id
    assert RunDirectory.open(run.path).run_id == run.run_id
    assert caplog.text.count("status.json") == 1


def test_the_run_id_is_also_read_from_the_readme(run):
    run.status.unlink()
    (run.path / "committed.json").unlink()
    assert RunDirectory.open(run.path).run_id == run.run_id
    run.readme.unlink()
    with pytest.raises(ResourceError, match="is not the folder of a run"):
        RunDirectory.open(run.path)


def test_a_run_id_that_contradicts_the_two_other_files_is_ignored(run, tmp_path_factory, caplog):
    with RunDirectory.create(tmp_path_factory.mktemp("other") / "run", "ppo") as another_run:
        another_run.record.update(step=9)
    run.record.update(step=4)
    original = run.status.read_bytes(), (run.path / "committed.json").read_bytes()
    shutil.copy(another_run.status, run.status)
    reopened = RunDirectory.open(run.path)
    assert (reopened.run_id, reopened.record.step) == (run.run_id, 4)
    assert "is that of another run" in caplog.text
    run.status.write_bytes(original[0])
    shutil.copy(another_run.path / "committed.json", run.path)
    reopened = RunDirectory.open(run.path)
    assert (reopened.run_id, reopened.record.step, reopened.record.is_lost) == (
        run.run_id,
        None,
        True,
    )
    assert not run.record.is_lost


@pytest.mark.parametrize(
    "content", [None, "", "[]", '{"run_id": "a"}', '{"run_id": "a", "step": true, "is_done": true}']
)
def test_an_unreadable_record_counts_as_lost(run, content):
    (run.path / "committed.json").unlink()
    if content is not None:
        (run.path / "committed.json").write_text(content)
    assert read_committed(run.path) is None
    assert RunDirectory.open(run.path).record.is_lost
