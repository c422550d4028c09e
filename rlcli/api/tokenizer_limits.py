"""Tries a tokenizer in a process with limited time and memory, before it is used without them.

A tokenizer comes with a model: it is third-party data, which may take forever on a short text, or
fill the memory. `_tokenizer_trial.py` has the texts and the limits.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from rlcli.errors import ModelError
from rlcli.processes import start_isolated

LIMIT_S = 20.0
"""Seconds of processor time for reading it and for all texts: ten times what today's largest
tokenizers need."""
PATIENCE_S = 240.0
"""Seconds within which the process must reply, on a machine that may be busy."""


def check_tokenizer(folder: Path, source: str) -> None:
    """Try the tokenizer.json of a folder, if it has one.
    Raises ModelError F32 if it exceeds a limit."""
    file = (folder / "tokenizer.json").resolve()
    if not file.is_file():
        return
    status = file.stat()
    fault = _fault(str(file), status.st_mtime_ns, status.st_size)
    if fault is not None:
        hint = (
            "its rules for replacing or splitting text take too long; use a "
            "tokenizer from another source"
        )
        raise ModelError(
            f"the tokenizer of {source} cannot be used: {fault}", hint=hint, code="F32"
        )


@functools.lru_cache(maxsize=64)
def _fault(file: str, changed_ns: int, size: int) -> str | None:
    """What is wrong with a file, tried once for each version of it."""
    script = Path(__file__).with_name("_tokenizer_trial.py")
    process = start_isolated(
        [sys.executable, "-P", str(script), str(os.getpid())], TOKENIZERS_PARALLELISM="false"
    )
    task = json.dumps({"file": file, "limit_s": LIMIT_S})
    try:
        reply, _ = process.communicate(task.encode() + b"\n", PATIENCE_S)
    except subprocess.TimeoutExpired:
        reply = b""
    finally:
        process.kill()
        process.communicate()
    if reply.endswith(b"\n"):
        fault = json.loads(reply)["fault"]
        return None if fault is None else str(fault)
    if process.returncode in (-signal.SIGPROF, -signal.SIGKILL):
        return f"a short text takes more than {LIMIT_S:g} s of processor time"
    return "it crashes on a short text, or needs too much memory for it"
