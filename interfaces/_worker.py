"""The worker's side of a `WorkerPool`: a process that receives JSON lines and answers each with one."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rlcli.processes import isolate

Work = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Maps a task to its reply."""


class Broken(Exception):
    """Why a worker cannot work at all: the parent receives `reply`, which contains `broken`."""

    def __init__(self, broken: str, **more: Any):
        super().__init__(broken)
        self.reply = {"broken": broken, **more}


def serve(prepare: Callable[[dict[str, Any]], Work]) -> None:
    """Process the parent's tasks until there are no more. `prepare` receives the pool's settings.

    Tasks come from a model, so they are not trusted: this process may not write files, has a memory limit and ends when
    its parent does. The kernel kills a task that uses up its processor time, even if the parent is gone and even if
    Python never gets a chance to notice. The limit is processor time and not wall-clock time, so that a result does not
    depend on the machine's other load.
    """
    tasks, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    for mode, descriptor in ((os.O_RDONLY, 0), (os.O_WRONLY, 1)):  # what libraries print must not mix with the replies
        null = os.open(os.devnull, mode)
        os.dup2(null, descriptor)
        os.close(null)

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    settings = json.loads(tasks.readline() or sys.exit(0))
    isolate(settings["parent"], settings["memory_bytes"], settings.get("file_bytes", 0))
    try:
        work = prepare(settings)
    except Broken as problem:
        reply(problem.reply)
        return
    reply({"ready": True})
    for line in tasks:
        task = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, task["cpu_s"])
        message = work(task)
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply(message)
