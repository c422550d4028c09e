"""The commands of the README, as `rlcli` of a new environment that has only the wheel: a recipe is
trained and converted, an interface of one's own is tested, a dataset is made."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

INTERFACE = '''
from dataclasses import dataclass

import torch

from rlcli.api import model as model_api
from rlcli.api.data import SequenceSample


@dataclass
class CustomInterface(model_api.ModelInterface):
    """Rewards short answers."""

    READS = {"inference": ("packed_input_ids",)}
    WRITES = {"inference": ("rewards",)}

    per_token: float = 0.01
    """Taken off for each token."""

    def inference(self, model, data, mb_spec):
        lengths = data.seqlens["packed_input_ids"]
        rewards = [-self.per_token * length for group in lengths for length in group]
        return SequenceSample.from_default(
            ids=data.ids,
            seqlens={"rewards": [[1] * len(group) for group in lengths]},
            data={"rewards": torch.tensor(rewards)},
        )


model_api.register_interface("custom", CustomInterface)
'''
SMALL = [
    "models.actor.path=null",
    (
        "models.actor.scratch={model_type: llama, hidden_size: 32, intermediate_size: 64, "
        "num_hidden_layers: 2, num_attention_heads: 4, max_position_embeddings: 128, "
        "tie_word_embeddings: true}"
    ),
    "models.actor.tokenizer=builtin:arithmetic",
    "datasets.train.args.problems=64",
    "datasets.held_out.args.problems=8",
    "generation.max_new_tokens=6",
    "train.prompts_per_step=8",
    "train.steps=2",
    "train.eval.every_steps=null",
]

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def rlcli(fresh_python, tmp_path_factory):
    """The installed command, in an empty folder; it must succeed. Variables that would lead it to
    this checkout are gone."""
    folder = tmp_path_factory.mktemp("user")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "RLCLI_", "VIRTUAL_ENV"))
    }
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(*arguments, cwd=folder):
        command = [fresh_python.with_name("rlcli"), *arguments]
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=350
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run.folder = folder
    return run


@pytest.fixture(scope="module")
def trained(rlcli):
    """The folder of a run of `rlcli train recipes/ppo_math.yaml`, with a smaller model."""
    out = rlcli("train", "recipes/ppo_math.yaml", *SMALL, "--run-dir", "run", "--quiet", "--json")
    result = json.loads(out)
    assert (result["ok"], result["steps"]) == (True, 2)
    return rlcli.folder / "run"


def test_the_environment_uses_the_wheel(rlcli, fresh_python):
    listed = rlcli("show", "interface", "ppo_actor")
    assert str(fresh_python.parents[1]) in listed.replace("\n", "")


def test_a_trained_role_is_converted_for_transformers(rlcli, trained, fresh_python):
    rlcli("convert", str(trained), "--role", "actor", "--to-hf", "out/model")
    code = "import transformers; transformers.AutoModelForCausalLM.from_pretrained('out/model')"
    subprocess.run([fresh_python, "-c", code], cwd=rlcli.folder, check=True, timeout=100)


def test_an_interface_of_a_new_project_is_tested(rlcli):
    rlcli("new", "project", "mine")
    (rlcli.folder / "mine" / "interfaces" / "custom.py").write_text(INTERFACE)
    out = rlcli("test", "interface", "custom", cwd=rlcli.folder / "mine")
    assert "FAIL" not in out
    assert " passed" in out.splitlines()[-1]


def test_a_new_dataset_passes_its_tests(rlcli):
    rlcli("new", "project", "ours")
    rlcli("new", "dataset", "my-dataset", cwd=rlcli.folder / "ours")
    out = rlcli("test", "dataset", "my-dataset", cwd=rlcli.folder / "ours")
    assert "FAIL" not in out
    assert " passed" in out.splitlines()[-1]
