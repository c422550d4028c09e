"""PPO on two ranks of deepspeed: a full disk and a killed rank lose no progress, and fsdp can
continue the run."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from warm_command import load_everything, run_here

KILL_ANYWHERE = runpy.run_path(str(Path(__file__).with_name("kill_anywhere.py")))
HOME = str(Path(__file__).resolve().parents[2])
RUN = (
    *KILL_ANYWHERE["ALGORITHMS"]["ppo"],
    "log.trackers=[]",
    "log.plot=false",
    "checkpoint.every_steps=1",
    "train.steps=4",
    "launch=local",
    "cluster.devices_per_node=2",
    "models.actor.backend.type=deepspeed",
    "models.actor.backend.args.zero_stage=3",
    "models.critic.backend.type=deepspeed",
    "models.critic.backend.args.zero_stage=1",
    "models.actor.backend.args.eps=1e-5",
    "models.critic.backend.args.eps=1e-5",
)
ON_FSDP = tuple(
    f"models.{role}.backend={{_replace_: true, type: fsdp, args: {{dtype: float32, lr: {lr}, "
    "beta2: 0.999, eps: 1e-5, weight_decay: 0.0, schedule: linear, min_lr_ratio: 0.1}}"
    for role, lr in (("actor", "1e-4"), ("critic", "3e-4"))
)
FULL_ONCE_THEN_FROZEN = {
    "RLCLI_ENABLE_FAILPOINTS": "1",
    "RLCLI_FAILPOINTS": "checkpoint.begun:ENOSPC@1;checkpoint.committed:stop@1",
}

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(420)]  # four runs


@pytest.fixture(scope="module", autouse=True)
def _library():
    """Importing it takes seconds, so that only the process imports it which runs these tests."""
    pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def command():
    """Runs commands in forks of this process, which has the library loaded."""
    from rlcli.backends._zero import import_deepspeed

    load_everything()
    import_deepspeed(torch.device("cpu"))
    return run_here


def steps(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_disturbed_run_resumes_exactly_and_is_continued_by_fsdp(tmp_path, command):
    undisturbed = command("train", *RUN, "--run-dir", "whole", cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    run, copy = tmp_path / "run", tmp_path / "other"
    ended, errors = killed_after_step_2(run)
    assert ended != 0
    assert "[F28]" in errors
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000000000002"]
    shutil.copytree(run, copy)
    resumed = command("resume", str(run), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert KILL_ANYWHERE["result"](run) == KILL_ANYWHERE["result"](tmp_path / "whole")

    refused = command("resume", str(copy), *ON_FSDP, cwd=tmp_path)
    assert refused.returncode == 2
    assert "models.actor.backend.type" in refused.stderr
    continued = command("resume", str(copy), *ON_FSDP, "--accept-changes", cwd=tmp_path)
    assert continued.returncode == 0, continued.stderr
    assert (copy / "ledger.jsonl").read_text() == (tmp_path / "whole/ledger.jsonl").read_text()
    for actual, expected in zip(steps(copy), steps(tmp_path / "whole"), strict=True):
        assert actual["step"] == expected["step"]
        for key in {
            "actor/loss",
            "actor/grad_norm",
            "critic/loss",
            "critic/grad_norm",
            "actor/kl",
        } & expected.keys():
            assert actual[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key


def killed_after_step_2(folder):
    """A run in separate processes, whose disk is full at the first checkpoint. At the second one
    its master is frozen while one of its ranks is killed."""
    events = folder.with_suffix(".events")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": HOME,
        **FULL_ONCE_THEN_FROZEN,
        "RLCLI_FAILPOINT_EVENTS": str(events),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "rlcli", "train", *RUN, "--run-dir", str(folder)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    master = KILL_ANYWHERE["frozen"](events, process)
    ranks = {
        entry["name"]: entry["pid"] for entry in json.loads((folder / "procs.json").read_text())
    }
    os.kill(ranks["rank1"], signal.SIGKILL)
    os.kill(master, signal.SIGCONT)
    _, errors = process.communicate(timeout=200)
    return process.returncode, errors
