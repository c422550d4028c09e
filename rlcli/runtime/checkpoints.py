"""The master's side of checkpoints: when one is due, how it is committed, and that one is whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlcli.api.timing import TimeSpan
from rlcli.checkpoint.commit import add_metrics, begin, folder_name, seal, write_json
from rlcli.checkpoint.completion import MASTER, Commits, RunIdentity
from rlcli.checkpoint.disk import check_free_space
from rlcli.checkpoint.manifest import FileDigest, read_manifest
from rlcli.checkpoint.run_state import STATE, RunState
from rlcli.checkpoint.verify import checkpoints_in, shared_out
from rlcli.disk_errors import disk_failure
from rlcli.errors import (
    HangError,
    ModelError,
    NumericError,
    ResourceError,
    RlcliError,
    WorkerError,
)
from rlcli.messaging.messages import WRITTEN, Fields, Report
from rlcli.observe.display import Display
from rlcli.observe.run_directory import RunDirectory
from rlcli.recipe.schema import Recipe
from rlcli.recipe.sections.checkpoint import Checkpoint
from rlcli.runtime.buffer import KeysByRank
from rlcli.runtime.data_order import StepSizes
from rlcli.runtime.ranks import Answers, Ranks
from rlcli.topology import Topology

SLOWEST = 50e6
"""Bytes per second: storage that is slower than this, for all ranks together, counts as hanging."""


class Schedule:
    """When a checkpoint is due; none of this is restored, so the current recipe decides."""

    def __init__(self, settings: Checkpoint, sizes: StepSizes):
        self._settings = settings
        self._sizes = sizes
        self._last = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether one is due after `step` steps."""
        every = self._settings.every_steps
        return bool(every and step % every == 0) or self._ends_epochs(step) or self._time_is_up()

    def note(self) -> None:
        """Note that one has just been taken."""
        self._last = time.monotonic()

    def _ends_epochs(self, step: int) -> bool:
        if self._settings.every_epochs is None or self._sizes.rows is None:
            return False
        span = self._settings.every_epochs * self._sizes.rows
        return self._sizes.position(step) // span > self._sizes.position(step - 1) // span

    def _time_is_up(self) -> bool:
        seconds = self._settings.every_seconds
        return seconds is not None and time.monotonic() - self._last >= seconds


class Checkpoints:
    """Has the workers write checkpoints, makes sure that they are committed,
    and reports the outcome."""

    def __init__(
        self,
        run: RunDirectory,
        identity: RunIdentity,
        recipe: Recipe,
        topology: Topology,
        ranks: Ranks,
        display: Display,
    ):
        folder = self.folder = run.checkpoints
        self.are_possible = True
        """Whether all engines can be checkpointed."""
        self.newest = 0
        """The step of the last checkpoint that was begun, or that the run continued from."""
        self._waited: float | None = None
        """Seconds that training has waited for a checkpoint since the last record."""
        self._identity = identity
        self._recipe = recipe
        self._topology = topology
        self._ranks = ranks
        self._display = display
        self._commits = Commits(
            folder,
            identity,
            recipe.checkpoint,
            topology.world_size,
            lambda step: run.record.update(step=step),
        )
        self._failed = 0
        self._size = 0
        """Bytes of a checkpoint."""
        ranks.listen(WRITTEN, self._take_in)

    @property
    def committed(self) -> int | None:
        """The last committed step."""
        return self._commits.committed

    def starts_from(self, step: int) -> None:
        """The run continues from the checkpoint of a step."""
        self._commits.committed = self.newest = step

    def check_room(self, size: int) -> None:
        """Check before the run that the disk has room for all checkpoints of `size` bytes that it
        may have to hold at once, in addition to the existing ones. Raises ResourceError F28."""
        settings, self._size = self._recipe.checkpoint, size
        if settings.is_written:
            most_kept = settings.keep_last + settings.keep_best
            missing = most_kept + 1 - min(most_kept, len(checkpoints_in(self.folder)))
            subject = f"storing {missing} checkpoints" if missing > 1 else "a checkpoint"
            check_free_space(self.folder, size * missing, subject)

    async def take(
        self,
        state: RunState,
        metrics: Mapping[str, float],
        sync: Callable[[], None],
        samples: KeysByRank | None = None,
    ) -> None:
        """Begin the checkpoint of a step. Without `checkpoint.asynchronous` it is committed when
        this returns.

        `samples`: rank → the part of the finished samples that it writes, as sample → keys. `sync`
        flushes the lines of the steps up to this one to disk, or raises ResourceError: a run that
        resumes here keeps them.
        """
        began = time.perf_counter()
        self.newest = state.step
        await self.settle(wait=True)
        self._display.phase("copying a checkpoint")
        try:
            sync()
            folder = begin(self.folder, state.step, self._identity.run_id, self._size)
        except ResourceError as error:
            self._count_failure(state.step, error)
        else:
            self._commits.begin(state.step, folder, dict(metrics))
            await self._write(state, folder, samples or {})
        self._waited = time.perf_counter() - began

    async def _write(self, state: RunState, folder: Path, samples: KeysByRank) -> None:
        """Have the ranks copy their parts of a checkpoint and write them;
        write the master's part."""
        requests = {
            rank: {"folder": str(folder), "step": state.step, "samples": samples.get(rank, {})}
            for rank in range(self._topology.world_size)
        }
        answers = await self._ranks.ask("checkpoint", requests)
        contents = asdict(state) | {
            aspect: _merged(answers, aspect) for aspect in ("versions", "interfaces")
        }
        try:
            self._commits.add(
                state.step, MASTER, seal(folder, [write_json(folder / STATE, contents)])
            )
        except (OSError, ResourceError) as error:
            self._commits.add(state.step, MASTER, failure=disk_failure(error, folder))
        except ValueError as error:  # JSON has no NaN
            message = (
                f"the state of step {state.step} holds a number that is not "
                "finite; no checkpoint is written"
            )
            raise NumericError(
                message, hint="the state is what the interfaces' state_dict() returns", code="F35"
            ) from error
        if not self._recipe.checkpoint.asynchronous:
            await self.settle(wait=True)

    async def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add numbers that were measured later to the checkpoint of a step, if there is one: the
        best ones are chosen by them."""
        await self.settle(wait=True)
        if self.committed == step and metrics:
            try:
                add_metrics(self.folder / folder_name(step), metrics)
            except RlcliError as error:
                self._display.warning(
                    f"the checkpoint of step {step} does not get its evaluation: {error}"
                )

    def drain_times(self) -> dict[str, float]:
        """`time/checkpoint`, if there was one since the last call of this."""
        waited, self._waited = self._waited, None
        return {} if waited is None else {"time/checkpoint": waited}

    def check_committed(self, step: int) -> None:
        """Check at the end of a run that the checkpoint of its last step is committed. Raises
        ResourceError F28."""
        if self.committed != step:
            problem = f"step {step}, the last one, is not committed; the warning above says why"
            hint = "make room, then rlcli resume"
            raise ResourceError(problem, where=str(self.folder), hint=hint, code="F28")

    async def settle(self, wait: bool = False) -> None:
        """Report what became of checkpoints; `wait` until none is being written. Raises errors from
        their threads, and ResourceError once too many could not be written."""
        while wait and self._commits.writing is not None:
            await self._ranks.next_report(
                f"the files of the checkpoint of step {self._commits.writing}"
            )
        for outcome in self._commits.outcomes():
            if isinstance(outcome.error, ResourceError):
                self._count_failure(outcome.step, outcome.error)
            elif outcome.error is not None:
                raise outcome.error
            else:
                self._failed = 0
            for warning in outcome.warnings:
                self._display.warning(warning)

    async def settle_at_error(self, patience: float) -> None:
        """Before an error ends the run: commit the checkpoint whose files are complete, or will be
        within `patience` seconds. Raises nothing: the run ends with the original error."""
        self._ranks.cancel()
        if self._commits.waits_for_ranks:
            self._display.phase("finishing a checkpoint")
        end = time.monotonic() + patience
        while self._commits.waits_for_ranks:
            try:
                await self._ranks.next_report(
                    "the files of a checkpoint", max(0.0, end - time.monotonic())
                )
            except (WorkerError, HangError):
                break
            except RlcliError:  # from another rank that hit the same error
                continue
        lost = self._commits.give_up()
        for outcome in self._commits.outcomes():
            if outcome.error is not None:
                self._display.warning(
                    f"the checkpoint of step {outcome.step} was not committed: {outcome.error}"
                )
        if lost is not None:
            self._display.warning(
                f"the checkpoint of step {lost} was not committed: its files are not complete"
            )
        if self.committed is not None:
            self._display.note(f"the last checkpoint is that of step {self.committed}")

    def _take_in(self, report: Report) -> None:
        """A rank's files are complete, or could not be written."""
        failure = report.failure.as_error() if report.failure is not None else None
        if isinstance(failure, ResourceError):
            message = f"rank {report.rank}: {failure.what}"
            failure = ResourceError(
                message, where=failure.where, hint=failure.hint, code=failure.code
            )
        step, began, ended = (report.value[name] for name in ("step", "began", "ended"))
        span = TimeSpan(
            f"writing the checkpoint of step {step}", "checkpoint", began, ended, "files"
        )
        self._ranks.times.add(report.rank, span)
        files = [FileDigest(**digest) for digest in report.value["files"]]
        self._commits.add(step, report.rank, files, failure)

    def _count_failure(self, step: int, why: ResourceError) -> None:
        self._failed += 1
        limit = self._recipe.checkpoint.max_failed_saves
        message = f"the checkpoint of step {step} could not be written: {why.what}"
        if self._failed > limit:
            last = (
                f"the last one is of step {self.committed}"
                if self.committed is not None
                else "there is none"
            )
            raise ResourceError(
                f"{message}; {last}", where=str(self.folder), hint=why.hint, code=why.code
            )
        self._display.warning(f"[{why.code}] {message} ({self._failed} of {limit})")


def _merged(answers: Answers, aspect: str) -> dict[str, Any]:
    """The ranks' answers by name. All ranks give the same; the lowest rank's is taken."""
    merged: dict[str, Any] = {}
    for rank in sorted(answers, reverse=True):
        merged |= answers[rank][aspect]
    return merged


async def verify_on_ranks(
    checkpoint: Path, ranks: Ranks, world_size: int, deadline: float
) -> list[ModelError]:
    """What is wrong with the files of a checkpoint, before anything of it is loaded. Each rank
    reads a share of them. `deadline`: seconds that they may take in addition to the time for
    reading."""
    manifest = read_manifest(checkpoint)
    shares = shared_out(manifest.files.values(), world_size)
    asked: dict[int, Fields] = {}
    for rank, share in enumerate(shares):
        if share:
            files = [file.as_json() for file in share]
            asked[rank] = {"folder": str(checkpoint), "files": files}
    answers = await ranks.ask("verify", asked, deadline + manifest.size / SLOWEST)
    return [ModelError(**fault) for rank in sorted(answers) for fault in answers[rank]["faults"]]
