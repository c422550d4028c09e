"""The facts needed to repeat a run: versions, machine, commit.
Nothing heavy is imported to collect them."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import rlcli
from rlcli.processes import allowed_cores
from rlcli.registry.requirements import installed_version

PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "math-verify",
)
VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "CUDA_VISIBLE_DEVICES",
    "RLCLI_PROJECT",
    "SLURM_JOB_ID",
)


def describe_environment() -> dict[str, Any]:
    """Python, platform, versions, the few environment variables that matter,
    and the commits of the code."""
    packages = {name: installed_version(name) for name in PACKAGES}
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": socket.gethostname(),
        "cpus": allowed_cores(),
        "rlcli": rlcli.__version__,
        "packages": packages,
        "variables": variables,
        "working_directory": str(Path.cwd()),
        "git": git_state(Path.cwd()),
        "rlcli_git": git_state(Path(rlcli.__file__).parent),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the checkout around a folder, and whether tracked files differ;
    None outside of one."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git; None if there is no git, no repository, no permission,
    or no answer in time."""
    command = [
        "git",
        "--no-optional-locks",
        "-c",
        "core.fsmonitor=false",
        "-C",
        str(folder),
        *arguments,
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
