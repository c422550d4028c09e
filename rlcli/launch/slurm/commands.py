"""Slurm's own commands, through which all of rlcli's communication with Slurm goes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rlcli.errors import ResourceError
from rlcli.launch.supervisor import PARENT
from rlcli.observe.display import EVENTS
from rlcli.processes import ended_how

ANSWERS_WITHIN = 60.0
"""Timeout in seconds; a busy controller takes tens of them,
and the commands wait for it by themselves."""
AGAIN_AFTER = 1.0
"""Seconds before a command that got no answer is repeated."""
HARMLESS = ("squeue", "sinfo", "sacct")
"""Commands that change nothing and may be repeated."""
BUSY = b"Socket timed out on send/recv operation"
"""What such a command says that has waited in vain for a busy controller."""
PRIVATE = (PARENT, EVENTS)
"""Variables that say who started this process: a job would inherit them."""
OF_JOBS = ("SLURM_", "SRUN_")
OF_CLUSTERS = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Beginnings of the names of variables that Slurm sets in a job, and those that others set."""
MOST_OUTPUT = 64 << 20
"""Maximum number of bytes of an answer that are read."""


class SlurmError(ResourceError):
    """Slurm is not available, does not answer, or refuses a request."""

    code = "F66"


def ask_slurm(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a command and return its output; `folder`: its working directory. Raises SlurmError."""
    answer = _run(command, folder)
    if command[0] in HARMLESS and _is_of_a_busy_controller(answer):
        time.sleep(AGAIN_AFTER)
        answer = _run(command, folder)
    if answer.returncode:
        name = command[0]
        raise SlurmError(
            _complaint(name, answer.stderr) or f"{name} {ended_how(answer.returncode)}"
        )
    return answer.stdout[:MOST_OUTPUT].decode(errors="replace")


def _is_of_a_busy_controller(answer: subprocess.CompletedProcess[bytes]) -> bool:
    """Whether a busy controller made the command fail: it hangs up, which ends the command by
    SIGPIPE, or lets it time out."""
    return answer.returncode < 0 or (answer.returncode > 0 and BUSY in answer.stderr)


def _environment(for_a_job: bool) -> dict[str, str]:
    """The variables for a command; `for_a_job`: it hands them on to a job. If this process is part
    of a job itself, the other one does not get its variables, which srun takes for options."""
    is_in_job = for_a_job and "SLURM_JOB_ID" in os.environ
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in PRIVATE
        and not (is_in_job and name.startswith(OF_JOBS) and name not in OF_CLUSTERS)
    }
    return inherited | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%Y-%m-%dT%H:%M:%S"}


def _run(command: Sequence[str], folder: Path | None) -> subprocess.CompletedProcess[bytes]:
    name = command[0]
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=_environment(for_a_job=name == "sbatch"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWERS_WITHIN,
            check=False,
        )
    except FileNotFoundError:
        where_it_is = "a machine of the cluster on which you submit jobs has it"
        raise SlurmError(
            f"there is no {name} here", where="launch=slurm", hint=where_it_is
        ) from None
    except subprocess.TimeoutExpired:
        message = f"{name} has not answered within {ANSWERS_WITHIN:.0f} s"
        raise SlurmError(
            message, hint="`scontrol ping` says whether Slurm's controller is up"
        ) from None
    except OSError as error:
        raise SlurmError(f"{name} cannot be run: {error.strerror or error}") from None


def _complaint(name: str, errors: bytes) -> str:
    """A command's error message, on one line: `sbatch: error: Batch job submission failed:
    Invalid qos`."""
    lines = errors[:10_000].decode(errors="replace").splitlines()
    complaints = [line.removeprefix(f"{name}: ").removeprefix("error: ").strip() for line in lines]
    return (
        f"{name}: {'; '.join(dict.fromkeys(filter(None, complaints)))}" if any(complaints) else ""
    )
