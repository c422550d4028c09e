"""Deliberate faults at named places, with which tests show that a run survives them.

    RLCLI_ENABLE_FAILPOINTS=1
    RLCLI_FAILPOINTS="checkpoint.appeared:kill@2;checkpoint.sealed:ENOSPC@1-3"

makes the second passage through `checkpoint.appeared` kill the process, and the first three through
`checkpoint.sealed` fail with a full disk. A name is that of a place, or `*` for any; an action is
`kill`, `stop` (freeze), `sleep<seconds>`, `note` (only records the event) or the name of an errno;
without `@` every passage counts. Passages are counted per process. Before it acts, each fault
writes a line to the file that RLCLI_FAILPOINT_EVENTS names, or to stderr: a fault that did not
happen proves nothing.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlcli.errors import UsageError

FAILPOINTS = "RLCLI_FAILPOINTS"
ENABLE = "RLCLI_ENABLE_FAILPOINTS"
EVENTS = "RLCLI_FAILPOINT_EVENTS"
FAULT = re.compile(
    r"(?P<place>\*|[\w.]+):(?P<action>kill|stop|note|sleep\d+(?:\.\d+)?|E[A-Z0-9]+)"
    r"(?:@(?P<from>\d+)(?:-(?P<to>\d+))?)?"
)


@dataclass(frozen=True)
class _Fault:
    point: str
    action: str
    passages: range | None
    """Which passages it affects, from 1; None: all."""
    count: Iterator[int] = field(default_factory=lambda: itertools.count(1), compare=False)


def failpoint(point: str) -> None:
    """A place where a test may inject a fault. Costs one environment lookup; raises UsageError if
    faults are set and not enabled."""
    spec = os.environ.get(FAILPOINTS)
    if spec:
        check_failpoints()
        for fault in _faults(spec):
            if fault.point in (point, "*"):
                number = next(fault.count)
                if fault.passages is None or number in fault.passages:
                    _happen(point, fault.action, number)


def check_failpoints() -> None:
    """Refuse to run with faults that were set unintentionally or cannot be parsed.
    Raises UsageError."""
    spec = os.environ.get(FAILPOINTS)
    if not spec:
        return
    if os.environ.get(ENABLE) != "1":
        raise UsageError(
            f"{FAILPOINTS} is set: this would fail on purpose",
            hint=f"unset it; tests also set {ENABLE}=1",
        )
    _faults(spec)


@functools.lru_cache(maxsize=8)
def _faults(spec: str) -> tuple[_Fault, ...]:
    return tuple(_fault(text.strip()) for text in spec.split(";") if text.strip())


def _fault(text: str) -> _Fault:
    match = FAULT.fullmatch(text)
    if match is None or (match["action"].startswith("E") and not hasattr(errno, match["action"])):
        raise UsageError(
            f"{text!r} is not a fault",
            where=FAILPOINTS,
            hint="for example checkpoint.appeared:kill@2",
        )
    first = match["from"] and int(match["from"])
    passages = range(first, int(match["to"] or first) + 1) if first else None
    return _Fault(match["place"], match["action"], passages)


def _happen(point: str, action: str, number: int) -> None:
    _write_event({"failpoint": point, "action": action, "passage": number, "pid": os.getpid()})
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action.startswith("sleep"):
        time.sleep(float(action.removeprefix("sleep")))
    elif action != "note":
        number = getattr(errno, action)
        raise OSError(number, os.strerror(number), point)


def _write_event(event: dict[str, object]) -> None:
    line = (json.dumps(event) + "\n").encode()
    file = os.environ.get(EVENTS)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if file else 2
    try:
        os.write(descriptor, line)
    finally:
        if file:
            os.close(descriptor)
