"""The worker's side of a `WorkerPool`: a process that receives JSON lines and answers each with
one."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, TextIO

from rlcli.interfaces._prints import Prints
from rlcli.interfaces.rewards._process_tree import adopt_orphans, descendants_of, end_descendants_of
from rlcli.processes import die_with_parent, isolate

Work = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Maps a task to its reply."""
LONGEST_REPLY = 1 << 20
"""Bytes of a reply that a forked process may send."""


class Broken(Exception):
    """Why a worker cannot work at all: the parent receives `reply`, which contains `broken`."""

    def __init__(self, broken: str, **details: Any):
        super().__init__(broken)
        self.reply = {"broken": broken, **details}


def serve(
    prepare: Callable[[dict[str, Any]], Work],
    is_reply: Callable[[dict[str, Any]], bool] | None = None,
) -> None:
    """Process the parent's tasks until there are no more. `prepare` receives the pool's settings.

    With `is_reply` each task runs in a fork of the prepared process, so that nothing that one
    changes reaches the next; what a fork sends and `is_reply` does not accept is not a reply. What
    a task has started ends with it.

    Tasks come from a model, so they are not trusted: this process may not write files, has a memory
    limit and ends when its parent does. The kernel kills a task that uses up its processor time,
    even if the parent is gone and even if Python never gets a chance to notice. The limit is
    processor time and not wall-clock time, so that a result does not depend on the machine's other
    load.
    """
    tasks, replies = private_pipes()
    prints = Prints()

    def in_fork(task: dict[str, Any]) -> Mapping[str, Any]:
        return prints.added_to(work(task))

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(prints.added_to(message)) + "\n")
        replies.flush()

    settings = json.loads(tasks.readline() or sys.exit(0))
    isolate(settings["parent"], settings["memory_bytes"], settings.get("file_bytes", 0))
    adopt_orphans()
    try:
        work = prepare(settings)
    except Broken as problem:
        reply(problem.reply)
        return
    stays = frozenset(descendants_of(os.getpid()))
    reply({"ready": True})
    hidden = tasks.fileno(), replies.fileno()
    for line in tasks:
        task = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, task["cpu_s"])
        message = work(task) if is_reply is None else _forked(in_fork, task, is_reply, hidden)
        signal.setitimer(signal.ITIMER_PROF, 0)
        end_descendants_of(os.getpid(), stays)
        reply(message)


def private_pipes() -> tuple[BinaryIO, TextIO]:
    """The pipes from and to the parent. From now on what libraries print does not mix with
    replies."""
    tasks, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    for mode, descriptor in ((os.O_RDONLY, 0), (os.O_WRONLY, 1)):
        null = os.open(os.devnull, mode)
        os.dup2(null, descriptor)
        os.close(null)
    return tasks, replies


def _forked(
    work: Work,
    task: dict[str, Any],
    is_reply: Callable[[dict[str, Any]], bool],
    hidden: Sequence[int],
) -> Mapping[str, Any]:
    """The reply of a fork of this process, which does not see the descriptors `hidden`; or how it
    ended without one."""
    reply, reply_in = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for descriptor in (reply, *hidden):
                os.close(descriptor)
            die_with_parent()
            signal.setitimer(signal.ITIMER_PROF, task["cpu_s"])
            with os.fdopen(reply_in, "w", encoding="utf-8") as file:
                json.dump(work(task), file)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(reply_in)
    received = _received(reply, child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0 or not received:
        return {"end": "CPU" if code == -signal.SIGPROF else "DIED"}
    try:
        message = json.loads(received)
    except ValueError:
        return {"end": "GARBLED"}
    return message if isinstance(message, dict) and is_reply(message) else {"end": "GARBLED"}


def _received(descriptor: int, child: int) -> bytes:
    """What a child writes until it ends, which others that hold the descriptor may outlive."""
    handle = os.pidfd_open(child)
    received, is_open = bytearray(), True
    while is_open and len(received) <= LONGEST_REPLY:
        ready = select.select([descriptor, handle], [], [])[0]
        piece = os.read(descriptor, 1 << 16) if descriptor in ready else b""
        received += piece
        is_open = bool(piece)
    os.close(descriptor)
    os.close(handle)
    return bytes(received)
