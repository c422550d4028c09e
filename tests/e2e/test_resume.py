"""`kill -9` at any moment, then `rlcli resume`, gives the bytes of a run that was never killed, for
every algorithm."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from kill_anywhere import AHEAD, ALGORITHMS, QUICK, frozen, outcomes_of
from run_results import is_free, result
from warm_command import ENVIRONMENT

KILLS = 4
CASES = (*ALGORITHMS, *AHEAD, "dapo:2", "generation:2", "sft:2", "dapo_ahead_4:2")
"""A number after the colon is the number of ranks."""

pytestmark = pytest.mark.timeout(900)  # each test is several runs


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Case → the outcome of its runs."""
    return outcomes_of(KILLS, 1, tmp_path_factory.mktemp("killed"), *CASES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_runs_killed_at_random_moments_resume_exactly(case, outcomes):
    outcome = outcomes[case]
    assert "failure" not in outcome, outcome["failure"]
    assert outcome["kills"] >= KILLS
    assert outcome["differing"] == []


@pytest.mark.exhaustive
def test_a_killed_run_on_two_ranks_resumes_exactly(tmp_path, warm_command):
    settings = (*ALGORITHMS["ppo"], *QUICK, "launch=local", "cluster.devices_per_node=2")
    undisturbed = warm_command("train", *settings, "--run-dir", "whole", cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    run = tmp_path / "run"
    process, _ = frozen_at_step_2(run, *settings)
    process.kill()  # the master is killed with its supervisor, and the ranks with the master
    process.wait()
    while not is_free(run / "lock"):  # the last thread of the master releases it
        time.sleep(0.01)
    resumed = warm_command("resume", str(run), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert result(run) == result(tmp_path / "whole")


@pytest.mark.long
def test_a_stopped_run_commits_a_checkpoint_and_resumes_exactly(tmp_path, warm_command):
    settings = (*ALGORITHMS["sft"], *QUICK)
    undisturbed = warm_command("train", *settings, "--run-dir", "whole", cwd=tmp_path)
    assert undisturbed.returncode == 0, undisturbed.stderr
    run = tmp_path / "run"
    process, child = frozen_at_step_2(run, *settings)
    for pid in (process.pid, child):  # as a scheduler does
        os.kill(pid, signal.SIGTERM)
    os.kill(child, signal.SIGCONT)
    _, errors = process.communicate(timeout=200)
    stopped_at = json.loads((run / "status.json").read_text())["step"]
    assert process.returncode == (75 if stopped_at < 7 else 0), errors
    assert (run / f"checkpoints/step-{stopped_at:012d}/MANIFEST.json").exists()
    resumed = warm_command("resume", str(run), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert result(run) == result(tmp_path / "whole")


def frozen_at_step_2(folder, *settings):
    """A run whose master (or only process) has frozen itself after committing its first checkpoint:
    the command and the pid of that process."""
    events = folder.with_suffix(".events")
    faults = {
        "RLCLI_ENABLE_FAILPOINTS": "1",
        "RLCLI_FAILPOINTS": "checkpoint.committed:stop@1",
        "RLCLI_FAILPOINT_EVENTS": str(events),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "rlcli", "train", *settings, "--run-dir", str(folder)],
        cwd=folder.parent,
        env={**os.environ, **ENVIRONMENT, **faults},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, frozen(events, process)
