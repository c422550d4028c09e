"""The same episodes in another process, with another hash seed, clock and random state."""

from __future__ import annotations

import datetime
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from rlcli.testing.elsewhere import answers_elsewhere
from rlcli.testing.environment_checks.plays import Script, Trace

HASH_SEED = "1"
LATER = 40_000_000
"""Seconds, more than a year, by which clocks are ahead there."""
CLOCKS = ("time", "monotonic", "perf_counter", "process_time")


def traces_elsewhere(name: str, args: Mapping[str, Any], scripts: list[Script]) -> list[Trace]:
    """What the episodes lead to in another process. Raises RuntimeError if it fails."""
    order = {"name": name, "args": dict(args), "scripts": [asdict(script) for script in scripts]}
    ((_, traces),) = answers_elsewhere(__name__, order, [HASH_SEED])
    return list(traces)


def _shifted(clock: Callable[[], float], seconds: int) -> Callable[[], float]:
    return lambda: clock() + seconds


def _set_clocks() -> None:
    """Before the environment is imported, which may copy the names of functions."""
    for name in CLOCKS:
        clock = getattr(time, name)
        setattr(time, name, _shifted(clock, LATER))
        setattr(time, f"{name}_ns", lambda clock=clock: int((clock() + LATER) * 1e9))

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Self:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Self:
            return cls.now(datetime.UTC).replace(tzinfo=None)

    datetime.datetime = Later  # type: ignore[misc]


def _main(order: Mapping[str, Any]) -> None:
    _set_clocks()
    random.seed(LATER)
    from rlcli.testing.environment_checks.trial import EnvironmentTrial

    scripts = [Script(each["row"], tuple(each["turns"]), each["seed"]) for each in order["scripts"]]
    with tempfile.TemporaryDirectory() as folder:
        trial = EnvironmentTrial(order["name"], order["args"], Path(folder))
        print(json.dumps([trial.play(script).trace for script in scripts]))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
