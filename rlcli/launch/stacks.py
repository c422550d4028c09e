"""Locates the ranks of a hanging run by the stacks that they write to their logs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlcli.observe.run_logs import as_text
from rlcli.observe.tail import last_lines

STACK = re.compile(r'(?:Current thread|Thread) 0x[^\n]*\n((?:  File "[^\n]+\n)+)')
"""Stack of a thread. The last one is the main thread's, which is the oldest; the current one is
whichever thread handled the signal."""
FRAME = re.compile(r'  File "(.+)", line (\d+) in (\S+)')
COLLECTIVE = re.compile(r"/torch/distributed/|/torch/_dynamo/|/deepspeed/comm/")
"""Files in which a rank waits for others."""
IDLE = re.compile(r"/rlcli/(messaging/zmq_worker|runtime/worker_main)\.py$")
"""Files in which a rank waits for the master."""
INNERMOST = 8
"""Number of innermost frames that show what a rank is doing."""
LINES = 400
"""Lines at the end of a log that are searched for its last stack."""
WRITTEN_WITHIN = 5.0
"""Seconds within which a rank that is not frozen writes its stack."""
AT_REST = 0.2
"""Seconds without a new line after which a stack is complete."""


def component_line(stacks: str) -> str | None:
    """Location of the thread that crashed or handled the request, else of the main one, which comes
    last: the innermost line in a component, if there is one."""
    from rlcli.api.component import KINDS
    from rlcli.project import component_folders

    threads = re.findall(r"^(Current t|T)hread .*\n((?:  File .*\n)+)", stacks, re.MULTILINE)
    frames = threads[-1][1] if threads else ""
    frames = next((current for kind, current in threads if kind.startswith("C")), frames)
    places = re.findall(r'^  File "(.+)", line (\d+)', frames, re.MULTILINE)
    components = {str(folder) for kind in KINDS for folder in component_folders(kind)}
    innermost = (location for location in places if os.path.dirname(location[0]) in components)
    file, line = next(innermost, places[0] if places else (None, None))
    return f"{file}:{line}" if file else None


def ask_for_stacks(logs: Path, ranks: Sequence[int], ask: Callable[[], None]) -> None:
    """`ask` the ranks to write their stacks, and wait until they have."""
    files = [logs / f"rank{rank}.log" for rank in ranks]
    before = now = [_size(file) for file in files]
    ask()
    end = time.monotonic() + WRITTEN_WITHIN
    while time.monotonic() < end:
        time.sleep(AT_REST)
        earlier, now = now, [_size(file) for file in files]
        if now == earlier and all(size > old for size, old in zip(now, before, strict=True)):
            return


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def where_ranks_are(logs: Path, ranks: Sequence[int]) -> str:
    """Text after an error: which ranks the others wait for, and where those are; empty if the
    stacks do not show it."""
    waiting, elsewhere = [], []
    for rank in ranks:
        text = "\n".join(map(as_text, last_lines(logs / f"rank{rank}.log", LINES))) + "\n"
        stacks = STACK.findall(text)
        frames = FRAME.findall(stacks[-1])[:INNERMOST] if stacks else []
        if any(COLLECTIVE.search(file) for file, _, _ in frames):
            waiting.append(rank)
        elif frames and not any(IDLE.search(file) for file, _, _ in frames[:2]):
            elsewhere.append(f"rank {rank} is at {frames[0][0]}:{frames[0][1]} in {frames[0][2]}")
    if not waiting or not elsewhere:
        return ""
    those = (
        f"rank {waiting[0]} waits"
        if len(waiting) == 1
        else f"ranks {', '.join(map(str, waiting))} wait"
    )
    return f"; {', '.join(elsewhere)}, while {those} in a collective"
