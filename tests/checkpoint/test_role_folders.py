import json

import pytest

from rlcli.checkpoint.commit import begin, commit, seal
from rlcli.checkpoint.manifest import Manifest
from rlcli.checkpoint.role_folders import check_digests, find_role
from rlcli.errors import ModelError, UsageError


def _model(folder, weights=b"weights"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)


def _checkpoint(run, step, roles=("actor",)):
    folder = begin(run / "checkpoints", step, "run")
    for role in roles:
        _model(folder / "models" / role, f"{role} {step}".encode())
    files = seal(folder, sorted(path for path in folder.rglob("*") if path.is_file()))
    return commit(folder, Manifest(step, "run", "0", 1, "", {file.path: file for file in files}))


@pytest.fixture
def run(tmp_path):
    """A run in progress, with checkpoints of steps 2 and 10 and no models yet."""
    for step in (2, 10):
        _checkpoint(tmp_path, step, ("actor", "critic"))
    (tmp_path / "status.json").write_text(json.dumps({"state": "running"}))
    return tmp_path


def test_a_run_resolves_to_its_newest_checkpoint(run):
    location = find_role(run)
    assert (location.role, location.step) == ("actor", 10)
    assert location.folder == run / "checkpoints" / "step-000000000010" / "models" / "actor"


def test_a_finished_run_resolves_to_its_models(run):
    _model(run / "models" / "actor")
    # the models are of an earlier end, after which the run was resumed
    assert find_role(run).step == 10
    (run / "status.json").write_text(json.dumps({"state": "done"}))
    location = find_role(run)
    assert (location.folder, location.step) == (run / "models" / "actor", None)
    assert find_role(run, step=2).step == 2


def test_a_run_without_checkpoints_resolves_to_its_models(tmp_path):
    _model(tmp_path / "models" / "actor")
    assert find_role(tmp_path).folder == tmp_path / "models" / "actor"


def test_step_and_role_select_a_folder_of_a_run(run):
    assert find_role(run, role="critic", step=2).folder.parts[-3:] == (
        "step-000000000002",
        "models",
        "critic",
    )
    with pytest.raises(UsageError, match="there are: 2, 10"):
        find_role(run, step=3)
    with pytest.raises(UsageError, match="one of actor, critic"):
        find_role(run, role="reward")


def test_a_checkpoint_or_a_role_folder_may_be_named(run):
    checkpoint = run / "checkpoints" / "step-000000000002"
    assert find_role(checkpoint, role="critic").folder == checkpoint / "models" / "critic"
    location = find_role(checkpoint / "models" / "critic")
    assert (location.role, location.step, location.checkpoint) == ("critic", 2, checkpoint)
    with pytest.raises(UsageError, match="--step does not apply"):
        find_role(checkpoint, step=2)
    with pytest.raises(UsageError, match="--role does not apply"):
        find_role(checkpoint / "models" / "actor", role="actor")


def test_a_single_role_is_the_default(tmp_path):
    _checkpoint(tmp_path, 1, ("student",))
    assert find_role(tmp_path).role == "student"


def test_several_roles_without_an_actor_need_a_role(tmp_path):
    _checkpoint(tmp_path, 1, ("student", "teacher"))
    with pytest.raises(UsageError, match="one of student, teacher"):
        find_role(tmp_path)


def test_folders_without_a_run_are_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        find_role(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="neither a run"):
        find_role(tmp_path)
    (tmp_path / "status.json").write_text("{}")  # a run that has just begun
    with pytest.raises(ModelError, match="neither a checkpoint nor a model yet"):
        find_role(tmp_path)
    (tmp_path / "status.json").unlink()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ModelError, match="neither a checkpoint nor a model"):
        find_role(tmp_path)


def test_a_checkpoint_without_a_manifest_is_refused(run):
    (run / "checkpoints" / "step-000000000010" / "MANIFEST.json").unlink()
    with pytest.raises(ModelError, match="its save did not finish"):
        find_role(run)


def test_digests_of_a_role_are_checked(run, tmp_path):
    location = find_role(run)
    assert check_digests(location) == 2
    weights = location.folder / "model.safetensors"
    content = weights.read_bytes()
    for changed, code in ((b"Actor 10", "F18"), (b"actor", "F17")):
        weights.write_bytes(changed)
        with pytest.raises(ModelError) as caught:
            check_digests(location)
        assert caught.value.code == code
    weights.unlink()
    with pytest.raises(ModelError) as caught:
        check_digests(location)
    assert caught.value.code == "F20"
    weights.write_bytes(content)
    (location.folder.parent / "critic" / "config.json").unlink()
    assert check_digests(location) == 2  # of another role
