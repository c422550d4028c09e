"""Commits a checkpoint once its last part is on disk, in the thread that reports this part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlcli.checkpoint.commit import abandon, commit
from rlcli.checkpoint.manifest import FileDigest, Manifest
from rlcli.checkpoint.retention import Best, prune, strangers
from rlcli.errors import ResourceError
from rlcli.recipe.sections.checkpoint import Checkpoint
from rlcli.spelling import did_you_mean

MASTER = -1
"""The writer of the master's part of a checkpoint; the writer of a rank's part is its number."""
LONGEST_COMMIT = 60.0
"""Seconds to wait for a commit in progress when the run ends."""


@dataclass(frozen=True)
class RunIdentity:
    """What a manifest records about the run that a checkpoint belongs to."""

    run_id: str
    recipe_digest: str
    version: str
    """Version of rlcli."""


@dataclass(frozen=True)
class CommitOutcome:
    """What became of a checkpoint."""

    step: int
    error: Exception | None = None
    """Why it was not committed."""
    warnings: tuple[str, ...] = ()


@dataclass
class _Begun:
    """A checkpoint that is being written."""

    step: int
    folder: Path
    metrics: dict[str, float]
    missing: set[int]
    """Writers whose parts are not on disk yet."""
    files: list[FileDigest] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)


class Commits:
    """Collects the parts of one checkpoint after the other;
    the thread that adds the last part commits it.

    Training continues meanwhile, so nothing is raised or printed here: `outcomes` are for the
    master's own thread.
    """

    def __init__(
        self,
        folder: Path,
        identity: RunIdentity,
        settings: Checkpoint,
        world_size: int,
        note: Callable[[int], None],
    ):
        """`note` records outside the folder that a step is committed; it may raise OSError."""
        self.committed: int | None = None
        """The last committed step."""
        self._folder = folder
        self._identity = identity
        self._settings = settings
        self._world_size = world_size
        self._note = note
        self._changed = threading.Condition()
        self._begun: _Begun | None = None
        self._outcomes: list[CommitOutcome] = []
        self._mentioned: set[Path] = set()
        self._is_ranking_mentioned = False

    @property
    def writing(self) -> int | None:
        """The step of a checkpoint that is neither committed nor given up."""
        begun = self._begun
        return begun.step if begun is not None else None

    @property
    def waits_for_ranks(self) -> bool:
        """Whether a checkpoint waits only for the files of ranks before it can be committed."""
        begun = self._begun
        return begun is not None and MASTER not in begun.missing

    def begin(self, step: int, folder: Path, metrics: dict[str, float]) -> None:
        """Start accepting parts of this checkpoint. No other may be in progress."""
        with self._changed:
            self._begun = _Begun(step, folder, metrics, {MASTER, *range(self._world_size)})

    def add(
        self,
        step: int,
        writer: int,
        files: Sequence[FileDigest] = (),
        failure: Exception | None = None,
    ) -> None:
        """A writer's part of the checkpoint of a step is on disk, or has failed; after the last one
        the checkpoint is committed.

        Parts of a checkpoint that was given up are ignored.
        """
        with self._changed:
            begun = self._begun
            if begun is None or begun.step != step or writer not in begun.missing:
                return
            begun.files += files
            begun.failures += [failure] if failure is not None else []
            begun.missing.discard(writer)
            if begun.missing:
                return
        try:
            # without the lock: nobody waits while old checkpoints are deleted
            outcome = self._end(begun)
            with self._changed:
                self._outcomes.append(outcome)
        finally:
            with self._changed:
                self._begun = None
                self._changed.notify_all()

    def outcomes(self) -> list[CommitOutcome]:
        """What became of checkpoints since the last call, in order."""
        with self._changed:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def give_up(self) -> int | None:
        """Commit nothing more and leave unfinished files in their temporary folder; returns their
        step. Waits for a commit that another thread has begun."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._begun is None or bool(self._begun.missing), LONGEST_COMMIT
            )
            given_up, self._begun = self._begun, None
        return given_up.step if given_up is not None else None

    def _end(self, begun: _Begun) -> CommitOutcome:
        if begun.failures:
            abandon(begun.folder)
            # an error that ends the run takes precedence over a disk that failed once
            return CommitOutcome(
                begun.step, min(begun.failures, key=lambda error: isinstance(error, ResourceError))
            )
        try:
            committed = self._commit(begun)
        except Exception as error:
            abandon(begun.folder)
            return CommitOutcome(begun.step, error)
        self.committed = begun.step
        warnings = [
            *self._write_down(begun.step),
            *self._prune(committed),
            *self._mention_strangers(),
            *self._mention_unranked(begun),
        ]
        return CommitOutcome(begun.step, warnings=tuple(warnings))

    def _commit(self, begun: _Begun) -> Path:
        manifest = Manifest(
            step=begun.step,
            run_id=self._identity.run_id,
            rlcli=self._identity.version,
            world_size=self._world_size,
            recipe_digest=self._identity.recipe_digest,
            files={digest.path: digest for digest in begun.files},
            metrics=begun.metrics,
        )
        return commit(begun.folder, manifest)

    def _write_down(self, step: int) -> list[str]:
        try:
            self._note(step)
        except OSError as error:
            return [f"could not record that step {step} is committed: {error}"]
        return []

    def _prune(self, committed: Path) -> list[str]:
        """Delete older checkpoints; returns warnings."""
        settings = self._settings
        best = (
            Best(settings.best_metric, settings.best_is, settings.keep_best)
            if settings.keep_best
            else None
        )
        try:
            prune(
                self._folder,
                keep_last=settings.keep_last,
                keep_best=best,
                run_id=self._identity.run_id,
                committed=committed,
            )
        except Exception as error:
            return [f"old checkpoints could not be removed: {error}"]
        return []

    def _mention_strangers(self) -> list[str]:
        """Mention each only once."""
        try:
            unmentioned = [
                path
                for path in strangers(self._folder, self._identity.run_id)
                if path not in self._mentioned
            ]
        except ResourceError:
            return []
        if not unmentioned:
            return []
        self._mentioned.update(unmentioned)
        names = ", ".join(path.name for path in unmentioned[:5])
        rest = " …" if len(unmentioned) > 5 else ""
        return [
            f"kept in {self._folder}, as these may not be checkpoints of this run: {names}{rest}"
        ]

    def _mention_unranked(self, begun: _Begun) -> list[str]:
        """Mention once if a step reports others of the section of the metric that ranks
        checkpoints, but not that one. An evaluation has none at all in most steps."""
        metric = self._settings.best_metric
        section = metric.partition("/")[0] + "/"
        others = [name for name in begun.metrics if name.startswith(section)]
        is_lacking = self._settings.keep_best and others and metric not in begun.metrics
        if not is_lacking or self._is_ranking_mentioned:
            return []
        self._is_ranking_mentioned = True
        hint = did_you_mean(metric, others, f"there is {', '.join(others)}")
        return [
            f"checkpoint.keep_best does not count step {begun.step}, which has no {metric}; {hint}"
        ]
