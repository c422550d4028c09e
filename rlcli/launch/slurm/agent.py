"""The task of a job on each of its nodes: `python -P -m rlcli.launch.slurm.agent RUN_DIR MARK`. It
is a node's agent that first checks that the run's folder is the same one as on the first node."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from rlcli.files import open_private, read_regular, replace_file
from rlcli.launch.node import SHARED_MEETING, main
from rlcli.processes import STOP_SIGNALS, keep_private

MARK, SEEN = "first-node", "seen-by-node"
"""Files in the folder where nodes meet: what the first one writes, and what each answers."""
SEEN_WITHIN = 10.0
"""Seconds within which a shared file system shows on one node what another has written."""
UNSHARED = 67
"""Exit code of an agent that does not see the run's folder, or cannot write to it."""


def agent_command(python: str, run_dir: Path, mark: str) -> list[str]:
    """The command that each task runs; `mark`: the content it must find."""
    return [python, "-P", "-m", "rlcli.launch.slurm.agent", str(run_dir.absolute()), mark]


def offer(meeting: Path, mark: str) -> None:
    """Write, on the first node, the mark that all nodes must find."""
    replace_file(meeting / MARK, mark.encode())


def answer_file(meeting: Path, node: int) -> Path:
    return meeting / f"{SEEN}{node}"


def _answer(meeting: Path, mark: str, node: int) -> None:
    """Find what the first node has written, and write an answer for it. Raises OSError."""
    end = time.monotonic() + SEEN_WITHIN
    while _read(meeting / MARK) != mark:
        if time.monotonic() > end:
            raise OSError(f"{meeting} is not the folder that the first node sees by that name")
        time.sleep(0.1)
    replace_file(answer_file(meeting, node), mark.encode())


def _read(file: Path) -> str | None:
    try:
        return read_regular(file, 1024).decode()
    except (OSError, ValueError):
        return None


def _run(run_dir: Path, mark: str) -> int:
    """Run the agent. Returns the exit code."""
    for number in STOP_SIGNALS:  # until they can be reported
        signal.signal(number, signal.SIG_IGN)
    keep_private()
    node = int(os.environ["SLURM_NODEID"])
    try:
        _answer(run_dir / SHARED_MEETING, mark, node)
        descriptor = open_private(run_dir / "logs" / f"node{node}.log", os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        print(f"node {node} ({socket.gethostname()}): {error}", file=sys.stderr)
        return UNSHARED
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    return main(run_dir, node, STOP_SIGNALS)


if __name__ == "__main__":
    sys.exit(_run(Path(sys.argv[1]), sys.argv[2]))
