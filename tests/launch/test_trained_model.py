"""Models that commands use: the names of their weights, and that no temporary folder stays, however
a command ends."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from rlcli.api.engine import EngineState
from rlcli.api.model_export import own_weights
from rlcli.checkpoint.role_folders import RoleFolder
from rlcli.checkpoint.state import copy_to_host, write_weights
from rlcli.launch.evaluation import exam_recipe, examine, find_exam
from rlcli.launch.playing import rows_to_play
from rlcli.launch.trained_model import _as_published, trained_model
from rlcli.owned_folder import LOCK, remove_abandoned
from rlcli.recipe.resolve import load_recipe
from rlcli.testing.tiny_models import tiny_model

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


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_weights_of_a_checkpoint_have_the_names_of_transformers(family, tmp_path):
    lm = tiny_model(family)
    lm.save_pretrained(tmp_path / "published")
    checkpoint = tmp_path / "step-00000001"
    folder = checkpoint / "models" / "actor"
    folder.mkdir(parents=True)
    write_weights(copy_to_host(EngineState(own_weights(lm)), True), folder, 0)
    lm.config.save_pretrained(folder)
    published = _as_published(RoleFolder(folder, "actor", checkpoint, 1), tmp_path / "target")
    assert (published == folder) == (family == "llama"), "without experts nothing is copied"
    weights, expected = (
        load_file(path / "model.safetensors") for path in (published, tmp_path / "published")
    )
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_responses_are_as_long_as_in_the_evaluation_of_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "long.yaml").write_text(
        "extends: ppo_math\nevaluation: {generation: {max_new_tokens: 99, min_new_tokens: 3}}\n"
    )
    monkeypatch.chdir(tmp_path)
    exam = find_exam("long", None)
    assert exam.generation == {"max_new_tokens": 99, "min_new_tokens": 3, "stop_token_ids": []}
    asked = exam_recipe("some/model", exam, ["generation.max_new_tokens=5"]).recipe.generation
    assert (asked.max_new_tokens, asked.min_new_tokens) == (5, 3)


def test_a_run_has_its_rows_to_play_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    dataset = "{type: math_prompts, args: {path: rows.jsonl}}"
    resolved = load_recipe("grpo_calculator", [f"datasets.train={dataset}", "train.eval=null"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.resolved.yaml").write_text(resolved.to_yaml())
    (run / "environment.json").write_text(json.dumps({"working_directory": str(tmp_path)}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    rows = rows_to_play(Path("../run"))
    assert rows is not None
    assert rows.next_row().answer == "2"


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
