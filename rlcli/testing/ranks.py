"""Ranks for tests: real gloo processes, forked from the current one,
so that they cost a fraction of a second.

A fork has everything its parent has (torch is loaded, closures need no pickling); its result is
sent as JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlcli.api.network import LOOPBACK
from rlcli.processes import ProcessClock, die_with_parent
from rlcli.runtime.roles import MESH_ORDER
from rlcli.testing.contract import FailedElsewhere, Violation, skip_if

Work = Callable[[int], dict[str, Any]]
Frame = tuple[str, int, str]
"""File, line, function."""

_GRACE = 10.0
"""Seconds that ranks have to report where they are, after the timeout, or to end after a peer."""
_WRITING = 0.5
"""Seconds that they need to finish such a report."""
_SHOW_STACK = getattr(signal, "SIGRTMAX", signal.SIGURG)
"""Makes a rank write where its main thread is, also while it waits in native code."""
_LOST_PEER = "Connection closed by peer"
"""In gloo's error on a rank, where another one has died."""
_WITHOUT_LIMIT = timedelta(days=1)
"""For what gloo waits for: its own clock would count the time in which other processes compute."""


class RankError(FailedElsewhere):
    """A rank failed, the first one if there are several: `problem` is `rank 1: ValueError: …`, and
    the message ends with the traceback there."""


class RankDeath(RankError):
    """A rank ended without an exception: killed, or crashed in native code. The message ends with
    its last output."""


class RankTimeout(TimeoutError):
    """Ranks did not finish in time. `stacks` shows where each of them was: (file, line, function),
    innermost first."""

    def __init__(self, size: int, timeout: float, stacks: dict[int, list[Frame]]):
        lines = [f"{len(stacks)} of {size} ranks did not finish within {timeout:g} s"]
        for rank, frames in stacks.items():
            lines.append(f"rank {rank} was at")
            lines += [f"  {file}:{line} in {function}" for file, line, function in frames]
        super().__init__("\n".join(lines))
        self.stacks = stacks


def run_on_ranks(size: int, work: Work, timeout: float = 100) -> list[dict[str, Any]]:
    """The return values of `work(rank)` on each of `size` ranks of a gloo process group, by rank.

    The results must be JSON; floats are returned exactly. The children compute with one thread,
    on the CPU.

    Raises `Violation` if a rank did; `RankError` for any other exception of a rank, the first if
    there are several; `RankTimeout`, with the position of each unfinished rank, after `timeout`
    seconds, of which those do not count in which a rank had to wait for a processor. No child
    survives.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [_Rank(number, size, Path(folder)) for number in range(size)]
        children = {rank: _fork(rank, work) for rank in ranks}
        try:
            _wait(children, timeout)
        finally:
            for child in children.values():
                _kill(child)
        reports = {rank: rank.report() for rank in ranks}
        _raise_first_error(reports, timeout)
        return [report["result"] for report in reports.values()]


def skip_without_forks() -> None:
    """Skip the check if autograd would not run in a fork:
    torch refuses it when the parent process sees CUDA."""
    skip_if(
        torch.cuda.is_available(),
        "not tried: a process that sees GPUs cannot be forked; CUDA_VISIBLE_DEVICES= hides them",
    )


def mesh_of_ranks(**degrees: int) -> DeviceMesh | None:
    """The mesh of a role on these ranks, such as `mesh_of_ranks(dp=2)`, with all dimensions as in a
    run; None if there is only one rank."""
    if not dist.is_initialized():
        return None
    return init_device_mesh(
        "cpu", tuple(degrees.get(name, 1) for name in MESH_ORDER), mesh_dim_names=MESH_ORDER
    )


@dataclass(frozen=True)
class _Rank:
    number: int
    size: int
    folder: Path

    @property
    def answer(self) -> Path:
        return self.folder / f"{self.number}.json"

    @property
    def stack(self) -> Path:
        """File with the rank's position at the timeout."""
        return self.folder / f"{self.number}.stack"

    @property
    def errors(self) -> Path:
        """File with the rank's stderr."""
        return self.folder / f"{self.number}.err"

    def stood_at(self) -> list[Frame]:
        """Innermost first, outwards up to `work`; empty if it was not asked."""
        dumped = self.stack.read_text() if self.stack.exists() else ""
        matches = re.findall(r'File "(.+)", line (\d+) in (.+)', dumped)
        frames = [(file, int(line), function) for file, line, function in matches]
        return list(itertools.takewhile(lambda frame: frame[0] != __file__, frames))

    def report(self) -> dict[str, Any]:
        """The rank's report; empty if it did not finish."""
        return json.loads(self.answer.read_text()) if self.answer.exists() else {}

    def lost_a_peer(self) -> bool:
        """Whether it failed because another rank has ended."""
        return _LOST_PEER in self.report().get("error", "")

    def last_output(self) -> str:
        return self.errors.read_text(errors="replace").strip() if self.errors.exists() else ""

    def tell(self, **report: Any) -> None:
        """Write the report atomically: the parent may read it at any time."""
        partial = self.answer.with_suffix(".partial")
        partial.write_text(json.dumps(report | {"at": time.monotonic()}))
        partial.replace(self.answer)


def _fork(rank: _Rank, work: Work) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        _be(rank, work)
    return child


def _be(rank: _Rank, work: Work) -> NoReturn:
    """The body of a child. It exits with `os._exit`, because its parent's exit handlers must not
    run here."""
    code = 1
    # finalise nothing of the parent's here: groups and sockets have threads that do not exist in a
    # fork
    gc.freeze()
    leave_groups_of_parent()
    try:
        with rank.stack.open("w") as stack, rank.errors.open("w") as errors:
            os.dup2(errors.fileno(), 2)
            faulthandler.enable(errors)
            faulthandler.register(_SHOW_STACK, stack, all_threads=False)
            rank.tell(result=_work_in_group(rank, work))
            code = 0
            with suppress(Exception):
                gc.collect()  # whatever holds the process group must go before it
                dist.barrier()
                dist.destroy_process_group()
    except Violation as broken:
        rank.tell(violation=[broken.finding, broken.cause, broken.where])
    except BaseException as error:
        rank.tell(
            error=traceback.format_exception_only(error)[-1].strip(),
            trace="".join(traceback.format_exception(error)),
        )
    finally:
        os._exit(code)


_OF_PARENT: list[dict[Any, Any]] = []
"""In a child, its parent's process groups: kept alive, so that nothing ends them."""


def leave_groups_of_parent() -> None:
    """`destroy_process_group` would end these as well, and join their threads. They do not exist in
    a fork, but threads of its own groups may have got their stacks, and thus their identifiers: it
    would wait for its own, forever."""
    world = distributed_c10d._world
    # a rank may have a group of the same ranks, and so of the same name
    for name in world.pg_names.values():
        torch._C._distributed_c10d._unregister_process_group(name)
    for register in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.tags_to_pg,
        world.pg_to_tag,
    ):
        _OF_PARENT.append(dict(register))
        register.clear()


def _work_in_group(rank: _Rank, work: Work) -> dict[str, Any]:
    # setting what is set already fails now and then in a fork
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rank.folder / 'store'}",
        rank=rank.number,
        world_size=rank.size,
        timeout=_WITHOUT_LIMIT,
    )
    return work(rank.number)


def _wait(children: dict[_Rank, int], timeout: float) -> None:
    """Wait until all children are gone, or one of them has failed, as the others would then wait
    for it forever; at the timeout, until those that are left have reported their positions."""
    running = dict(children)
    clock = ProcessClock(children.values())
    while running and clock.seconds() < timeout:
        for rank, child in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del running[rank], children[rank]
                if rank.lost_a_peer():  # whose own end, the cause, may come a moment later
                    timeout = min(timeout, clock.seconds() + _GRACE)
                elif status != 0:
                    return
        time.sleep(0.002)
    if running:
        _have_stacks_shown(running)


def _have_stacks_shown(running: Mapping[_Rank, int]) -> None:
    for child in running.values():
        os.kill(child, _SHOW_STACK)
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline and not all(rank.stood_at() for rank in running):
        time.sleep(0.02)
    time.sleep(_WRITING)


def _kill(child: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _last_words(rank: _Rank) -> str:
    """What ended a rank in native code, such as a collective that does not match other ranks'."""
    match = re.search(r"what\(\):(.*)", rank.last_output())
    return match[1].strip() if match else ""


def _death(ranks: list[_Rank]) -> RankDeath:
    """That of the first rank with last output."""
    rank = next((rank for rank in ranks if rank.last_output()), ranks[0])
    words = _last_words(rank) or "without a word"
    return RankDeath(f"rank {rank.number}: died {words}", rank.last_output())


def _raise_first_error(reports: Mapping[_Rank, dict[str, Any]], timeout: float) -> None:
    """The earliest error is the cause; the others follow from it."""
    unfinished = [rank for rank, report in reports.items() if not report]
    failed = [rank for rank, report in reports.items() if report and "result" not in report]
    if failed:
        rank = min(failed, key=lambda rank: reports[rank]["at"])
        report = reports[rank]
        if rank.lost_a_peer() and any(map(_last_words, unfinished)):
            raise _death(unfinished)
        if "violation" in report:
            raise Violation(*report["violation"])
        raise RankError(f"rank {rank.number}: {report['error']}", report["trace"])
    stacks = {rank.number: rank.stood_at() for rank in unfinished}
    if any(stacks.values()):
        raise RankTimeout(len(reports), timeout, stacks)
    if unfinished:
        raise _death(unfinished)
