"""Processes with another hash seed, in which a component must be the same."""

from __future__ import annotations

import os
import subprocess
import sys

from rlcli.project import PACKAGE, VARIABLE, current_project

PATIENCE = 60


def start(module: str, order: str, hash_seed: str) -> subprocess.Popen[str]:
    """Start `python -m module order`; what it prints is for its caller."""
    project = current_project()
    path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
    env = {
        **os.environ,
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": path.rstrip(os.pathsep),
        **({VARIABLE: str(project)} if project is not None else {}),
    }
    return subprocess.Popen(
        [sys.executable, "-m", module, order],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
