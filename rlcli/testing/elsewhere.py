"""Processes with another hash seed, in which a component must be the same."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rlcli.processes import ProcessClock
from rlcli.project import PACKAGE, VARIABLE, current_project

PATIENCE = 60.0
"""Seconds that a process may take; those in which others computed in its place do not count."""
LOOK_SECONDS = 0.5


def answers_elsewhere(
    module: str, order: Any, hash_seeds: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """(hash seed, the JSON that `python -m module ORDER` prints last) for each of the seeds. Raises
    RuntimeError if a process fails."""
    with contextlib.ExitStack() as ended:
        started = (_start(module, json.dumps(order), seed) for seed in hash_seeds)
        processes = [ended.enter_context(process) for process in started]
        for process in processes:
            ended.callback(process.kill)
        for seed, process in zip(hash_seeds, processes, strict=True):
            out, err = _output_of(process)
            if process.returncode:
                raise RuntimeError(f"it does not work in another process:\n{err[-2000:]}")
            yield seed, json.loads(out.splitlines()[-1])


def _output_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it writes to stdout and stderr until it ends. Raises TimeoutExpired."""
    clock = ProcessClock([process.pid])
    while clock.seconds() < PATIENCE:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=LOOK_SECONDS)
    raise subprocess.TimeoutExpired(process.args, PATIENCE)


def _start(module: str, order: str, hash_seed: str) -> subprocess.Popen[str]:
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
