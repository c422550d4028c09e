"""A project of its own: toy components whose numbers do not depend on who computes what, and a recipe for them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_ranks import forked_ranks
from warm_command import load_everything

from rlcli.launch.resume import resume_run
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it, and so would every process started here

TOY = Path(__file__).parent / "toy"
HOME = str(Path(__file__).parents[2])

RECIPE = """\
seed: 5
toy: {seconds: 0.0}
models:
  actor:
    scratch: {model_type: llama, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 1}
    tokenizer: builtin:toy_rows
    backend: toy
  critic: {init: actor, head: value, backend: toy}
  reward: {backend: null}
datasets:
  train: {type: toy_rows, args: {rows: 20}}
  held_out: {type: toy_rows, args: {rows: 5}}
graph:
  gen: {model: actor, call: generate, interface: {type: toy, args: "${toy}"}, inputs: [packed_prompts],
        outputs: [packed_input_ids, prompt_mask, packed_logprobs]}
  score: {model: reward, call: inference, interface: toy_reward, inputs: [packed_input_ids], outputs: [rewards, solved]}
  value: {model: critic, call: inference, interface: toy,
          inputs: [packed_input_ids, packed_logprobs], outputs: [values]}
  train_actor: {model: actor, call: train_step, interface: {type: toy, args: "${toy}"},
                inputs: [packed_input_ids, prompt_mask, packed_logprobs, rewards, solved, values]}
  train_critic: {model: critic, call: train_step, interface: toy,
                 inputs: [packed_input_ids, prompt_mask, packed_logprobs, rewards, solved, values]}
train:
  steps: 3
  prompts_per_step: 8
  eval:
    dataset: held_out
    every_steps: 2
    graph:
      eval_gen: {model: actor, call: generate, interface: toy, inputs: [packed_prompts],
                 outputs: [packed_input_ids, prompt_mask]}
      eval_score: {model: reward, call: inference, interface: toy_reward, inputs: [packed_input_ids],
                   outputs: [rewards, solved]}
      eval_fit: {model: critic, call: evaluate, interface: toy, inputs: [packed_prompts],
                 max_tokens_per_microbatch: 9}
cluster: {device: cpu}
launch: {type: inline, startup_deadline: 300, step_deadline: 60}
log: {tensorboard: false, plot: false, samples_per_step: 2}
"""


@pytest.fixture(scope="session")
def components(tmp_path_factory):
    """A user's project with the toy components; one for all tests, for a process imports a component once."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    for source in TOY.glob("*.txt"):
        kind, _, name = source.stem.partition("-")
        (folder / kind).mkdir(exist_ok=True)
        shutil.copy(source, folder / kind / f"{name}.py")
    return folder


@pytest.fixture
def project(tmp_path, components, monkeypatch):
    """A working directory with toy.yaml."""
    (tmp_path / "toy.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLCLI_PROJECT", str(components))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture
def endless(project):
    """Start toy.yaml without an end as a user does; returns the process once it has done a few steps."""
    started = []

    def start(*options, folder="run"):
        process = subprocess.Popen(
            [sys.executable, "-m", "rlcli", "train", "toy.yaml", "--run-dir", folder, "train.steps=100000", *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": HOME},
        )  # fmt: skip
        started.append(process)
        metrics, deadline = project / folder / "metrics.jsonl", time.monotonic() + 200
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def quick_ranks(project):
    """Ranks are forks, where a test is about what they do; torchrun starts them where it is about processes."""
    load_everything()
    with forked_ranks():
        yield


@pytest.fixture
def train(project):
    """Train the toy recipe into a folder of the working directory."""

    def run(*overrides, name="run"):
        with PlainDisplay(sys.stderr) as display:
            return run_recipe(load_recipe("toy.yaml", overrides), project / name, display), project / name

    return run


@pytest.fixture
def resume(project):
    """Resume such a run."""

    def run(*overrides, name="run", accept=False):
        with PlainDisplay(sys.stderr) as display:
            return resume_run(project / name, overrides, display, accept_changes=accept)

    return run
