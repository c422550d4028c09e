"""Servers of other people's environments, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER = Path(__file__).with_name("openenv_server.py")


@contextmanager
def openenv_server(sessions: int, token: str = "") -> Iterator[str]:
    """The address of an OpenEnv server with room for some sessions. With a token it refuses those
    who do not have it, and repeats it to the others."""
    command = [sys.executable, str(SERVER), str(sessions)]
    variables = {**os.environ, "PARROT_TOKEN": token}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()
