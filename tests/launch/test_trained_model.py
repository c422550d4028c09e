"""The temporary folders of commands that use a model: however one ends, its folders do not stay."""

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from rlcli.launch.evaluation import examine
from rlcli.launch.trained_model import trained_model
from rlcli.owned_folder import LOCK, remove_abandoned

HOME = str(Path(__file__).parents[2])
COMMAND = """
import sys, time
from pathlib import Path
from rlcli.launch.trained_model import trained_model
with trained_model(sys.argv[1]):
    print("has it", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary folders are."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_the_copy_of_a_command_that_was_ended_is_removed_by_the_next(model, temporary):
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(model)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": HOME, "TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout.readline() == "has it\n"
        (folder,) = temporary.iterdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        with trained_model(str(model)):
            assert folder.exists(), "its command is still running"
        process.terminate()
    assert list(temporary.iterdir()) == [folder]
    with trained_model(str(model)):
        assert not folder.exists()
    assert list(temporary.iterdir()) == []


def test_the_folder_of_an_evaluation_is_owned_and_removed(temporary, monkeypatch):
    folders = []

    @contextmanager
    def workers(recipe, topology, folder):
        folders.append(folder)
        yield mock.Mock()

    def evaluate_alone(*arguments):
        remove_abandoned(temporary)
        assert list(temporary.iterdir()) == folders
        (folder,) = folders
        return [file.name for file in folder.iterdir()]

    monkeypatch.setattr("rlcli.launch.workers.workers", workers)
    monkeypatch.setattr("rlcli.runtime.evaluation.evaluate_alone", evaluate_alone)
    monkeypatch.setattr("rlcli.topology.plan_topology", mock.Mock())
    assert examine(mock.Mock(), None, 0) == [LOCK]
    assert list(temporary.iterdir()) == []
