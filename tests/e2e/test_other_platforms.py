"""Training and the other verbs without features specific to Linux: see `without_linux`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_project import TINY_PPO
from warm_command import ENVIRONMENT

WITHOUT_LINUX = Path(__file__).parent / "without_linux"


@pytest.fixture(scope="module")
def rlcli(tmp_path_factory):
    """Runs a command to its end, which must succeed; returns its output.
    All commands share a folder."""
    folder = tmp_path_factory.mktemp("elsewhere")
    search_path = os.pathsep.join(
        [str(WITHOUT_LINUX), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": search_path}

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "rlcli", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


LINUX_ONLY = """
import ctypes, os, signal
print(hasattr(ctypes.CDLL(None), "prctl"), hasattr(signal, "SIGRTMIN"), os.path.exists("/proc"))
"""


def test_linux_features_are_missing_in_the_emulated_python():
    environment = {**os.environ, "PYTHONPATH": str(WITHOUT_LINUX)}
    done = subprocess.run(
        [sys.executable, "-c", LINUX_ONLY],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False False False\n"


@pytest.mark.exhaustive
def test_a_model_is_trained_and_used_without_linux(rlcli):
    rlcli("train", "ppo_math", *TINY_PPO, "--run-dir", "run")
    assert "done" in rlcli("status", "./run")
    assert rlcli("eval", "./run")
    assert rlcli("generate", "./run", "--prompt", "1+1")


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ["ls"],
        ["show", "ppo_actor"],
        ["validate", "ppo_math"],
        ["plan", "ppo_math"],
        ["explain", "ppo_math", "ppo.kl_ctl"],
        ["check", "ppo_math"],
        ["tokens", "sft_math"],
        ["doctor"],
    ],
    ids=lambda command: command[0],
)
def test_verbs_work_without_linux(rlcli, command):
    assert rlcli(*command)


@pytest.mark.long
def test_a_component_is_tested_without_linux(rlcli):
    assert "passed" in rlcli("test", "dataset", "arithmetic")
