"""A server as a separate process: started, watched, and ended together with everything it has
started.

Libraries' servers start processes that outlive them, and a death signal reaches direct children
only. So there is a guardian (`server_guardian.py`) between this process and the server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcli.files import open_private

GUARDIAN = Path(__file__).with_name("server_guardian.py")
OF_RANKS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME")
OF_OUR_PYTHON = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV")
"""Variables that describe this process: its place in the world of ranks, and its Python."""
PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "RLCLI_", "PYTEST_")
END_WITHIN = 10.0
"""Seconds for a guardian to end its server."""


class ServerProcess:
    """A command that runs until it is stopped, or ends by itself."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ):
        """`environment`: variables in addition to ours. The command's output is appended to `log`.
        Raises OSError."""
        with os.fdopen(open_private(log, os.O_WRONLY | os.O_APPEND), "ab") as output:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", str(GUARDIAN), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=_inherited() | dict(environment or {}),
                start_new_session=True,  # signals that stop the run must not reach it
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self._guardian.poll()

    def stop(self) -> None:
        """End it at once, with everything it has started."""
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        try:
            self._guardian.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guardian.pid, signal.SIGKILL)
            self._guardian.wait()


def _inherited() -> dict[str, str]:
    ours = (*OF_RANKS, *OF_OUR_PYTHON)
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(PREFIXES)
    }
