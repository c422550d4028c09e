"""The last command of a batch script: `python -P -m rlcli.launch.slurm.job VALUES`. It becomes the
run's supervisor.

    {"folder": "/home/me/project", "environment": {"RLCLI_PROJECT": "/home/me/project"},
     "runs": [{"folder": "/scratch/runs/ppo_math/1",
               "arguments": ["resume", "--in-job", "--", "/scratch/…/1"]}, …]}

A job of an array executes the run with its number. Nothing in this file ever passes through a
shell.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from rlcli.files import make_folder, open_private, read_object
from rlcli.processes import STOP_SIGNALS

LOG = Path("logs", "job.log")
"""Output of the supervisor and the master, in the run's folder."""


def main(file: Path) -> None:
    """Continue as `rlcli resume --in-job` of the run. A stop signal that arrives meanwhile stays
    pending until it is handled (see `supervisor`): blocked signals survive `exec`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    values = read_object(file)
    is_array = len(values["runs"]) > 1
    index = int(os.environ["SLURM_ARRAY_TASK_ID"]) if is_array else 0
    run: dict[str, Any] = values["runs"][index]
    log = Path(run["folder"]) / LOG
    make_folder(log.parent)
    descriptor = open_private(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.chdir(values["folder"])
    if not is_array:  # a job that was submitted by one of an array has inherited its variables
        os.environ.pop("SLURM_ARRAY_TASK_ID", None)
    os.execve(
        sys.executable,
        [sys.executable, "-P", "-m", "rlcli", *run["arguments"]],
        {**os.environ, **values["environment"]},
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
