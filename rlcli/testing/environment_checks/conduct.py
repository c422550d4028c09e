"""Checks of what an environment does besides: to its input, to the process, to files and the
network, and what it leaves behind."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from rlcli.testing.contract import Contract, skip_unless
from rlcli.testing.environment_checks.plays import Play, Script, attempt
from rlcli.testing.environment_checks.trial import SECRET, EnvironmentTrial
from rlcli.testing.process_state import StartedTasks

Descriptor = tuple[str, str]
"""Its number and what it refers to."""
Opened = set[threading.Thread | Descriptor]

DESCRIPTORS = Path("/proc/self/fd")
END_WITHIN = 2.0
"""Seconds for threads to end, and for descriptors to be closed, after `close`."""
RELEASE = "release in close() all that was opened, also if reset() was never called"


class ConductChecks(Contract):
    def test_input_stays(self, trial: EnvironmentTrial) -> None:
        """rows and arguments of tools are not modified"""
        for play in trial.plays:
            trial.demand(
                not play.modified,
                f"{play.modified} of an episode is modified",
                "copy it first: the episodes of a group share their row, and calls are recorded",
            )

    def test_network(self, trial: EnvironmentTrial) -> None:
        """the network is used only if NETWORK is declared"""
        hosts = ", ".join(dict.fromkeys(trial.conduct_of_all().connections))
        trial.demand(
            trial.cls.NETWORK or not hosts,
            f"it connects to {hosts}",
            "declare NETWORK: ClassVar[bool] = True, or leave the network alone",
        )

    def test_files(self, trial: EnvironmentTrial) -> None:
        """files are written in a temporary folder only"""
        writes = trial.conduct_of_all().writes
        trial.demand(
            not writes,
            f"it writes {', '.join(writes[:1])}",
            "use tempfile.TemporaryDirectory, and clean it up in close()",
        )

    def test_paths(self, trial: EnvironmentTrial) -> None:
        """a path that a policy writes leads to no file outside of the folder of its episode"""
        skip_unless(trial.schemas, "has no tools")
        for probe in trial.path_probes:
            finding = f"{probe.title} returns what is in a file elsewhere"
            cause = "refuse names with / or .., or compare what Path.resolve() makes of them"
            trial.demand(SECRET not in str(probe.text), finding, cause, probe.tool)

    def test_process_stays(self, trial: EnvironmentTrial) -> None:
        """settings of the whole process stay as they are"""
        changes = ", ".join(dict.fromkeys(trial.conduct_of_all().changes))
        trial.demand(
            not changes,
            f"it changes the whole process: {changes}",
            "many episodes share it: restore it, or give a process of its own to what needs it",
        )

    def test_closes(self, trial: EnvironmentTrial) -> None:
        """close() releases everything, at any time, and may be called again"""
        for script in trial.scripts:
            for turns in (None, 0, 1, len(script.turns)):
                problem = _closing_problem(trial, script, turns)
                occasion = "before reset()" if turns is None else f"after {turns} turns"
                trial.demand(not problem, f"closed {occasion}, it {problem}", RELEASE, "close")


def _closing_problem(trial: EnvironmentTrial, script: Script, turns: int | None) -> str:
    """What is wrong with an episode that is closed twice after some turns, or before reset() for
    None; empty if nothing is."""
    before, tasks = _opened(), StartedTasks.now()
    with trial.watched():
        environment = trial.make()
        if turns is not None:
            play = Play(environment, script)
            while play.turn < turns and play.advance():
                pass
        closings = [attempt(environment.close) for _ in range(2)]
    errors = [str(closing) for closing in closings if closing.error is not None]
    if errors:
        return f"raises {errors[0]}"
    left = _left(before, tasks, trial.folder)
    return f"leaves {left}" if left else ""


def _left(before: Opened, tasks: StartedTasks, scratch: Path) -> str:
    """What an episode has left behind, in words; empty if nothing."""
    remains = sorted(map(_in_words, _lasting_since(before)))
    remains += [f"the file {path.name}" for path in sorted(scratch.iterdir())]
    if processes := StartedTasks.now().left_since(tasks):
        remains.append(processes)
    return ", ".join(remains[:3])


def _in_words(opened: threading.Thread | Descriptor) -> str:
    if isinstance(opened, threading.Thread):
        return f"the thread {opened.name}"
    return f"open {opened[1]}"


def _lasting_since(before: Opened) -> Opened:
    """What is open or running since then and does not end by itself: other threads of this process
    may open a file at any moment, and close it again."""
    end = time.monotonic() + END_WITHIN
    opened = _opened() - before
    while opened and time.monotonic() < end:
        time.sleep(0.01)
        opened &= _opened()
    return opened


def _opened() -> Opened:
    names = os.listdir(DESCRIPTORS) if DESCRIPTORS.is_dir() else []
    targets = {name: _target(name) for name in names}
    descriptors = {(name, target) for name, target in targets.items() if target}
    return {*threading.enumerate(), *descriptors}


def _target(descriptor: str) -> str:
    """What a descriptor refers to; empty if it is closed again."""
    try:
        return os.readlink(DESCRIPTORS / descriptor)
    except OSError:
        return ""
