"""What a run writes to disk, and the space available for it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.recipe.role_sources import stored_roles

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe


@dataclass(frozen=True)
class Storage:
    """Disk space in bytes."""

    checkpoint: int | None
    """Weights and optimizer state that a run needs to be resumed; None if some size is unknown."""
    checkpoints_kept: int
    """Maximum kept at once, including the one being written."""
    models: int | None
    """The folders of the saved roles, at the end."""
    folder: str
    free: int | None
    """Free in the file system of the folder; None if unknown."""

    @property
    def needed(self) -> int | None:
        """The most space needed at once."""
        if self.checkpoint is None or self.models is None:
            return None
        return self.checkpoint * self.checkpoints_kept + self.models

    @property
    def is_short(self) -> bool:
        """Whether more is needed than is free."""
        return self.free is not None and (self.needed or 0) > self.free


def plan_storage(
    recipe: Recipe, parameters: Mapping[str, int], widths: Mapping[str, int]
) -> Storage:
    """`parameters`: role → parameters of the whole model, if known; `widths`: bytes of each in the
    folder that is saved at the end. Checkpoints are written in float32."""
    policy = recipe.checkpoint
    checkpoint: int | None = None
    stored = stored_roles(recipe)
    if all(role in parameters for role in stored):
        checkpoint = sum(4 * parameters[role] for role in stored)
        checkpoint += sum(8 * parameters[role] for role in recipe.trained_roles)
    models = None
    if all(role in parameters for role in recipe.saved_roles):
        models = sum(widths[role] * parameters[role] for role in recipe.saved_roles)
    count = policy.keep_last + policy.keep_best + 1 if policy.is_written else 0
    return Storage(checkpoint, count, models, recipe.log.dir, _free(recipe.log.dir))


def _free(folder: str) -> int | None:
    """Bytes that are free where a folder is or will be."""
    location = Path(folder).expanduser().absolute()
    existing = next((parent for parent in (location, *location.parents) if parent.is_dir()), None)
    try:
        return shutil.disk_usage(existing).free if existing else None
    except OSError:
        return None
