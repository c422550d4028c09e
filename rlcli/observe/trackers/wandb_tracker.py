"""Weights & Biases, online or offline (`WANDB_MODE`). Its own environment variables apply, such as
WANDB_API_KEY, WANDB_ENTITY and WANDB_PROJECT."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcli.observe.run_overview import DIED
from rlcli.observe.trackers.contract import SAMPLE_COLUMNS, TrackedRun, Update, sample_row
from rlcli.observe.trackers.redaction import bare_address

OFFLINE = ("offline", "dryrun")


class WandbTracker:
    """Steps of W&B only increase, and what has been sent stays: a run whose steps are repeated gets
    a new one there, of the same name and group. Offline, the files are written anew."""

    def __init__(self) -> None:
        self._run: Any = None
        self._is_replaced = False
        """Whether the server has a run of this id, whose steps have been repeated."""
        self._rows: dict[str, list[list[Any]]] = {}
        """Phase → rows of samples that were not logged yet."""

    def continues(self, run: TrackedRun, entry: str) -> bool:
        return not _is_offline() and entry.startswith(_server(run))

    def open(self, run: TrackedRun, entry: str | None) -> str:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        fresh_id = f"{run.id}-{secrets.token_hex(2)}" if self._is_replaced else run.id
        run_id = fresh_id if entry is None else entry.rpartition("/")[2]
        folder = _folder(run)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._run = wandb.init(
            id=run_id,
            resume="never" if entry is None else "must",
            project=_project(run),
            name=run.name,
            group=run.group,
            tags=list(run.tags),
            config={**run.settings, "origins": dict(run.origins)},
            dir=str(folder),
            settings=_only_what_the_run_writes(),
        )
        if _is_offline():
            return str(Path(self._run.dir).parent)
        return f"{_server(run)}{run_id}"

    def discard(self, run: TrackedRun, entry: str) -> None:
        self._is_replaced = entry.startswith(_server(run))
        if _is_offline():
            for folder in (_folder(run) / "wandb").glob(f"offline-run-*-{run.id}"):
                shutil.rmtree(folder)

    def write(self, updates: Sequence[Update]) -> None:
        for update in updates:
            for phase, samples in update.samples_by_phase().items():
                self._rows.setdefault(phase, []).extend(list(sample_row(each)) for each in samples)
            # a step is logged once: samples that come before its numbers wait for them, and those
            # that come after them are logged with the next step
            if update.numbers:
                self._run.log(update.numbers | self._tables(), step=update.step, commit=True)

    def _tables(self) -> dict[str, Any]:
        """The samples that were not logged yet."""
        import wandb

        rows, self._rows = self._rows, {}
        return {
            f"samples/{phase}": wandb.Table(columns=list(SAMPLE_COLUMNS), data=of_phase)
            for phase, of_phase in rows.items()
        }

    def close(self, state: str, curve: Path | None) -> None:
        import wandb

        # in the summary they take no step, with which a run that is resumed continues
        picture = {"curve": wandb.Image(str(curve))} if curve is not None else {}
        self._run.summary.update(self._tables() | picture)
        self._run.finish(exit_code=1 if state in ("failed", DIED) else 0)


def _is_offline() -> bool:
    return os.environ.get("WANDB_MODE", "online") in OFFLINE


def _project(run: TrackedRun) -> str:
    return os.environ.get("WANDB_PROJECT") or run.project


def _server(run: TrackedRun) -> str:
    """Where runs go, before their id."""
    server = bare_address(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    names = (server, os.environ.get("WANDB_ENTITY"), _project(run), "")
    return "/".join(name for name in names if name is not None)


def _folder(run: TrackedRun) -> Path:
    return Path(os.environ.get("WANDB_DIR") or run.folder / "trackers")


def _only_what_the_run_writes() -> Any:
    """Settings without what W&B would collect by itself: command lines, output, code, packages, and
    figures of a process that is not the run."""
    import wandb

    return wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        save_code=False,
        silent=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
