"""Ranks on several GPUs train as one rank does, and pass weights on to a copy that generates, over
NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from toy_project import TINY_PPO

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("two_devices")]

TINY_SFT = [
    "datasets.train.args.problems=64",
    "train.steps=3",
    "models.actor.backend.args.warmup_steps=0",
    "train.prompts_per_step=8",
    "log.plot=false",
    "models.actor.backend.args.eps=1e-2",  # so that rounding does not decide the sign of a step
    "models.actor.backend.args.dtype=float32",
]
LAYOUTS = {
    "one rank": [],
    "sharded": ["launch=local", "cluster.devices_per_node=2"],
    "tensor-parallel": ["launch=local", "cluster.devices_per_node=2", "models.actor.mesh.tp=2"],
}


@pytest.fixture(scope="module")
def train(tmp_path_factory, device_name):
    """Trains a recipe in a folder of its own, which it returns."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(name, recipe, *overrides):
        arguments = [recipe, *overrides, f"cluster.device={device_name}", "--run-dir", name]
        command = [sys.executable, "-m", "rlcli", "train", *arguments, "--quiet"]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return folder / name

    return run


@pytest.fixture(scope="module")
def on_one_rank(train):
    """The weights that one rank ends with."""
    return weights_of(train("one", "sft_math", *TINY_SFT))


def weights_of(run):
    return load_file(run / "models" / "actor" / "model.safetensors")


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if LAYOUTS[name]])
def test_two_ranks_train_the_weights_of_one(layout, train, on_one_rank):
    trained = weights_of(train(layout, "sft_math", *TINY_SFT, *LAYOUTS[layout]))
    torch.testing.assert_close(trained, on_one_rank, rtol=1e-3, atol=1e-4)


def test_a_copy_on_another_device_samples_with_the_trained_weights(train):
    """Its log-probs are those of the trainer, which they would not be with other weights."""
    run = train(
        "copied",
        "ppo_math",
        *TINY_PPO,
        "models.actor.backend.args.warmup_steps=0",
        "launch=local",
        "cluster.devices_per_node=2",
        "models.actor.rollout.devices=1",
        "models.actor.backend.args.lr=1e-2",
        "models.actor.backend.args.dtype=float32",
    )
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["actor/sampler_gap"] for step in steps if "actor/sampler_gap" in step]
    assert len(gaps) == 2
    assert max(gaps) < 1e-3
