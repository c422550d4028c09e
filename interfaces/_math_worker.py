"""A process that compares mathematical answers: JSON lines in, JSON lines out. Started by `_math_pool`, as a
script.

Answers come from a model, so this process trusts them with nothing: it is started apart, may not write files,
has a bound on memory, ends when its parent does, and is killed by the kernel when an answer takes too long,
even if the parent is gone and even if Python never gets the turn to notice.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES = 4 << 30
PR_SET_PDEATHSIG = 1


def isolate(parent: int) -> None:
    for asks_to_stop in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # the run, to end its step
        signal.signal(asks_to_stop, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(0)


def compare(answer: str, expected: str) -> bool:
    from math_verify import parse, verify

    # An answer without an anchor parses as an expression; as LaTeX it needs dollar signs.
    gold = parse(f"${expected}$", parsing_timeout=None) or parse(expected, parsing_timeout=None)
    if not gold:
        raise ValueError(f"the expected answer {expected[:80]!r} is no mathematical expression")
    for text in (f"${answer}$", answer):
        found = parse(text, parsing_timeout=None)
        if found and verify(gold, found, timeout_seconds=None):
            return True
    return False


def serve() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print must not mix with the replies

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        import math_verify  # noqa: F401
    except Exception as problem:
        reply({"broken": f"{type(problem).__name__}: {problem}"})
        return
    reply({"ready": True})
    for line in sys.stdin:
        task = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, task["limit_s"] + 1.0)
        try:
            message: dict[str, Any] = {"equal": bool(compare(task["answer"], task["expected"]))}
        except Exception as problem:
            message = {"error": f"{type(problem).__name__}: {str(problem)[:200]}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(message)


if __name__ == "__main__":
    isolate(parent=int(sys.argv[1]))
    serve()
