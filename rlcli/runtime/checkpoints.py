"""The master's side of checkpoints: when one is due, how it is committed, what a run goes on from."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlcli.checkpoint.commit import abandon, begin, commit, seal, write_json
from rlcli.checkpoint.disk import check_free_space, disk_failure
from rlcli.checkpoint.manifest import FileDigest, Manifest
from rlcli.checkpoint.retention import Best, prune
from rlcli.checkpoint.verify import checkpoints_in
from rlcli.errors import DataError, ModelError, NumericError, ResourceError, UsageError
from rlcli.observe.display import Display
from rlcli.recipe.schema import Checkpoint, Recipe
from rlcli.runtime.data_order import DataOrder
from rlcli.runtime.requests import Answers, Requests
from rlcli.topology import Topology

STATE = "state.json"
FORMAT = 1


@dataclass(frozen=True)
class RunState:
    """What the master must remember between two steps. Everything else follows from the recipe and the step."""

    step: int
    """Steps that are done."""
    samples: int
    """Rows of the training dataset that they took."""
    datasets: Mapping[str, str]
    """Digest of each dataset."""
    versions: Mapping[str, Any] = field(default_factory=dict)
    """Role → its model's version."""
    interfaces: Mapping[str, Any] = field(default_factory=dict)
    """Call → the state of its interface."""
    nonfinite: list[tuple[int, list[str]]] = field(default_factory=list)
    """Steps in a row whose update was skipped, and their samples."""
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Of a verified checkpoint. Raises ModelError F85 if a newer rlcli wrote it."""
        fields = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if fields.get("format") != FORMAT:
            raise ModelError(
                f"its state has format {fields.get('format')!r}; this rlcli reads {FORMAT}",
                where=str(folder),
                code="F85",
            )
        return cls(**fields)


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run goes on from."""

    folder: Path
    state: RunState

    def check_datasets(self, digests: Mapping[str, str], recipe: Recipe) -> None:
        """The training data must be what they were. Raises DataError F65."""
        name = recipe.train.dataset
        before, now = self.state.datasets.get(name), digests.get(name)
        if before is not None and before != now:
            raise DataError(
                f"dataset {name} is not what it was at step {self.state.step}: {before[:12]} then, {str(now)[:12]} now",
                hint="put the old data back, or start a new run from models/",
                code="F65",
            )

    def check_end(self, steps: int, recipe: Recipe) -> None:
        """Steps that are done cannot be taken back. Raises UsageError F84."""
        if steps >= self.state.step:
            return
        done, epochs = self.state.step, recipe.train.epochs
        wanted = (
            f"train.steps is {steps}" if recipe.train.steps is not None else f"train.epochs={epochs} is {steps} steps"
        )
        raise UsageError(
            f"{wanted}, but the run has done {done} steps",
            hint=f"rlcli ckpt ls shows what it has kept; train.steps of {done} or more goes on",
            code="F84",
        )


@dataclass(frozen=True)
class RunIdentity:
    """What a manifest says about the run that a checkpoint belongs to."""

    run_id: str
    recipe_digest: str
    version: str
    """Of rlcli."""


class Schedule:
    """When a checkpoint is due; nothing of it is restored, so the recipe of the day decides."""

    def __init__(self, settings: Checkpoint, order: DataOrder):
        self._settings = settings
        self._order = order
        self._last = time.monotonic()

    def is_due(self, step: int) -> bool:
        """After `step` steps."""
        every = self._settings.every_steps
        return bool(every and step % every == 0) or self._ends_epochs(step) or self._time_is_up()

    def next_after(self, step: int) -> int | None:
        """The first step beyond `step` at whose end one is surely due: no later step may begin before."""
        if self._settings.every_steps is None and self._settings.every_epochs is None:
            return None
        return next(later for later in range(step + 1, step + 1 + self._longest()) if self._is_planned(later))

    def note(self) -> None:
        """One has just been taken."""
        self._last = time.monotonic()

    def _is_planned(self, step: int) -> bool:
        every = self._settings.every_steps
        return bool(every and step % every == 0) or self._ends_epochs(step)

    def _longest(self) -> int:
        epochs = (self._settings.every_epochs or 0) * -(-self._order.rows // self._order.rows_per_step) + 1
        return max(self._settings.every_steps or 0, epochs)

    def _ends_epochs(self, step: int) -> bool:
        if self._settings.every_epochs is None:
            return False
        span = self._settings.every_epochs * self._order.rows
        return self._order.place(step) // span > self._order.place(step - 1) // span

    def _time_is_up(self) -> bool:
        seconds = self._settings.every_seconds
        return seconds is not None and time.monotonic() - self._last >= seconds


@dataclass
class _Begun:
    """A checkpoint whose files are being written."""

    step: int
    folder: Path
    metrics: dict[str, float]
    sealed: list[FileDigest] = field(default_factory=list)
    """What the master wrote itself."""
    failed: ResourceError | None = None
    """Why it could not."""


class Checkpoints:
    """Has the workers write checkpoints, commits what they wrote, and clears old ones away."""

    def __init__(self, folder: Path, identity: RunIdentity, recipe: Recipe, topology: Topology, requests: Requests,
                 display: Display):  # fmt: skip
        self.folder = folder
        self.committed: int | None = None
        """The last step that is safe."""
        self._identity = identity
        self._recipe = recipe
        self._topology = topology
        self._requests = requests
        self._display = display
        self._begun: _Begun | None = None
        self._asked = False
        self._failed = 0
        self._size = 0
        """Of a checkpoint, in bytes."""

    def check_room(self, size: int) -> None:
        """Before the run: as many checkpoints of so many bytes as may come to lie there at once, beside those that do
        already, must fit on the disk. Raises ResourceError F28."""
        settings, self._size = self._recipe.checkpoint, size
        if settings.at_end or settings.on_stop or settings.every_steps or settings.every_epochs:
            kept = settings.keep_last + settings.keep_best
            more = kept + 1 - min(kept, len(checkpoints_in(self.folder)))
            what = f"storing {more} checkpoints" if more > 1 else "a checkpoint"
            check_free_space(self.folder, size * more, what)

    def take(self, state: RunState, metrics: Mapping[str, Any]) -> None:
        """Begin the checkpoint of a step. Without `checkpoint.asynchronous` it is committed when this returns."""
        self.settle(wait=True)
        self._display.phase("copying a checkpoint")
        try:
            folder = begin(self.folder, state.step, self._identity.run_id, self._size)
        except ResourceError as error:
            self._count_failure(state.step, error)
            return
        answers = self._requests.ask_all("checkpoint", {"folder": str(folder)})
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        self._begun = _Begun(state.step, folder, numbers)
        try:
            whole = asdict(state) | {"versions": self._versions(answers), "interfaces": _interfaces(answers)}
            self._begun.sealed = seal(folder, [write_json(folder / STATE, whole)])
        except (OSError, ResourceError) as error:
            self._begun.failed = disk_failure(error, folder)
        except ValueError as error:  # JSON has no NaN
            what = f"the state of step {state.step} holds a number that is not finite; no checkpoint is written"
            raise NumericError(what, hint="the state is what the interfaces' state_dict() say", code="F35") from error
        if not self._recipe.checkpoint.asynchronous:
            self.settle(wait=True)

    def settle(self, wait: bool = False) -> None:
        """Ask the ranks whether their files are written; the answers commit the checkpoint. `wait` until they have."""
        while self._begun is not None:
            if not self._asked:
                self._asked = True
                everyone = range(self._topology.world_size)
                self._requests.post("checkpoint_written", {rank: {"wait": wait} for rank in everyone}, self._answered)
            if not wait:
                return
            self._requests.wait()

    def _answered(self, answers: Answers) -> None:
        self._asked = False
        if self._begun is None or not all(answer["done"] for answer in answers.values()):
            return
        failures = [
            ResourceError(f"rank {rank}: {answer['failed']}", code=answer["code"])
            for rank, answer in answers.items()
            if "failed" in answer
        ]
        if self._begun.failed is not None or failures:
            self._fail(self._begun.failed or failures[0])
            return
        files = [FileDigest(**digest) for answer in answers.values() for digest in answer["files"]]
        try:
            self._commit(self._begun, [*self._begun.sealed, *files])
        except ResourceError as error:
            self._fail(error)

    def _commit(self, begun: _Begun, files: list[FileDigest]) -> None:
        settings = self._recipe.checkpoint
        manifest = Manifest(
            step=begun.step,
            run_id=self._identity.run_id,
            rlcli=self._identity.version,
            world_size=self._topology.world_size,
            recipe_digest=self._identity.recipe_digest,
            files={digest.path: digest for digest in files},
            metrics=begun.metrics,
        )
        committed = commit(begun.folder, manifest)
        self._begun, self._failed, self.committed = None, 0, begun.step
        best = Best(settings.best_metric, settings.best_is, settings.keep_best) if settings.keep_best else None
        try:
            prune(self.folder, keep_last=settings.keep_last, keep_best=best, committed=committed)
        except ResourceError as error:
            self._display.warning(f"old checkpoints could not be removed: {error}")

    def _fail(self, why: ResourceError) -> None:
        assert self._begun is not None
        step, folder = self._begun.step, self._begun.folder
        self._begun = None
        abandon(folder)
        self._count_failure(step, why)

    def _count_failure(self, step: int, why: ResourceError) -> None:
        self._failed += 1
        limit = self._recipe.checkpoint.max_failed_saves
        what = f"the checkpoint of step {step} could not be written: {why.what}"
        if self._failed > limit:
            kept = f"the last one is of step {self.committed}" if self.committed is not None else "there is none"
            raise ResourceError(f"{what}; {kept}", where=str(self.folder), hint=why.hint, code=why.code)
        self._display.warning(f"[{why.code}] {what} ({self._failed} of {limit})")

    def _versions(self, answers: Answers) -> dict[str, Any]:
        return {
            placement.role: answers[placement.ranks[0]]["versions"][placement.role]
            for placement in self._topology.placements
        }


def _interfaces(answers: Answers) -> dict[str, Any]:
    """Call → state, of the lowest rank that runs it: the state is the same on all of them."""
    states: dict[str, Any] = {}
    for rank in sorted(answers):
        for call, state in answers[rank]["interfaces"].items():
            states.setdefault(call, state)
    return states
