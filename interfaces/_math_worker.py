"""A process that compares mathematical expressions: JSON lines in, JSON lines out. Started by `_math_pool`, as a
script.

Expressions come from a model, so this process trusts them with nothing: it is started apart, may not write files, has
a bound on memory and ends when its parent does. A comparison that uses up its processor time is ended by the kernel,
even if the parent is gone and even if Python never gets the turn to notice. It is processor time and not the clock, so
that a verdict does not depend on what else the machine does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import lru_cache
from typing import Any

from rlcli.processes import isolate

MEMORY_BYTES = 4 << 30


def parsed(latex: str) -> Any:
    """The whole text as one expression; raises if it is none. (math-verify's `parse` would look for one in it.)"""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from math_verify.grader import should_treat_as_complex

    normalized = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    return latex2sympy(latex, is_real=not should_treat_as_complex(latex), normalization_config=normalized)


parsed_gold = lru_cache(maxsize=256)(parsed)


def compare(answer: str, expected: str) -> dict[str, Any]:
    from math_verify import verify

    try:
        gold = parsed_gold(expected)
    except Exception as problem:
        return {"no_gold": f"{type(problem).__name__}: {str(problem)[:200]}"}
    try:
        found = parsed(answer)
    except Exception:
        return {"unparsed": True}
    return {"equal": bool(verify(gold, found, timeout_seconds=None))}


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
        signal.setitimer(signal.ITIMER_PROF, task["limit_s"])
        try:
            message = compare(task["answer"], task["expected"])
        except Exception as problem:  # of the answer's own making: the gold was read
            message = {"crashed": f"{type(problem).__name__}: {str(problem)[:200]}"}
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply(message)


if __name__ == "__main__":
    isolate(parent=int(sys.argv[1]), memory_bytes=MEMORY_BYTES)
    serve()
