"""PPO on two ranks of deepspeed: a full disk and the kill of a rank cost nothing, and fsdp can take the run over."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

KILL_ANYWHERE = runpy.run_path(str(Path(__file__).with_name("kill_anywhere.py")))
HOME = str(Path(__file__).resolve().parents[2])
RUN = (
    *KILL_ANYWHERE["ALGORITHMS"]["ppo"], "log.tensorboard=false", "log.plot=false", "checkpoint.every_steps=2",
    "train.steps=10", "launch=local",
    "cluster.devices_per_node=2", "models.actor.backend.type=deepspeed", "models.actor.backend.args.zero_stage=3",
    "models.critic.backend.type=deepspeed", "models.critic.backend.args.zero_stage=1",
    "models.actor.backend.args.eps=1e-5", "models.critic.backend.args.eps=1e-5",
)  # fmt: skip
ON_FSDP = tuple(
    f"models.{role}.backend={{_replace_: true, type: fsdp, args: {{dtype: float32, lr: {lr}, beta2: 0.999, eps: 1e-5, "
    "weight_decay: 0.0, schedule: linear, min_lr_ratio: 0.1}}"
    for role, lr in (("actor", "1e-4"), ("critic", "3e-4"))
)
FULL_ONCE = {"RLCLI_ENABLE_FAILPOINTS": "1", "RLCLI_FAILPOINTS": "checkpoint.begun:ENOSPC@1"}

pytestmark = pytest.mark.timeout(420)  # four runs


def steps(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_faults_cost_nothing_and_fsdp_continues(tmp_path, warm_command):
    whole = warm_command("train", *RUN, "--run-dir", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    run, other = tmp_path / "run", tmp_path / "other"
    ended, said = killed_after_step_4(run)
    assert ended != 0
    assert "[F28]" in said
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*"))[0] == "step-000000000004"
    shutil.copytree(run, other)
    resumed = warm_command("resume", str(run), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert KILL_ANYWHERE["result"](run) == KILL_ANYWHERE["result"](tmp_path / "whole")

    refused = warm_command("resume", str(other), *ON_FSDP, cwd=tmp_path)
    assert refused.returncode == 2
    assert "models.actor.backend.type" in refused.stderr
    taken = warm_command("resume", str(other), *ON_FSDP, "--accept-changes", cwd=tmp_path)
    assert taken.returncode == 0, taken.stderr
    assert (other / "ledger.jsonl").read_text() == (tmp_path / "whole/ledger.jsonl").read_text()
    for found, wanted in zip(steps(other), steps(tmp_path / "whole"), strict=True):
        assert found["step"] == wanted["step"]
        for key in {"actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "actor/kl"} & wanted.keys():
            assert found[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-6), key


def killed_after_step_4(folder):
    """A run whose disk is full at its first checkpoint; once the second is there, one of its ranks is killed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": HOME, **FULL_ONCE}
    process = subprocess.Popen(
        [sys.executable, "-m", "rlcli", "train", *RUN, "--run-dir", str(folder)],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (folder / "checkpoints/step-000000000004").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    ranks = {entry["name"]: entry["pid"] for entry in json.loads((folder / "procs.json").read_text())}
    os.kill(ranks["rank1"], signal.SIGKILL)
    _, said = process.communicate(timeout=200)
    return process.returncode, said
