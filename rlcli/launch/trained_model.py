"""The model that a command uses: from a folder, the Hub, or a run of rlcli."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.api.headway import BYTES, doing
from rlcli.api.run_folder import RESOLVED_RECIPE
from rlcli.api.weight_files import PARTS
from rlcli.errors import UsageError
from rlcli.observe.run_search import named_folder
from rlcli.owned_folder import temporary_folder
from rlcli.recipe.named_files import HUB_ID

if TYPE_CHECKING:
    from rlcli.checkpoint.role_folders import RoleFolder


@dataclass(frozen=True)
class TrainedModel:
    """A model that an engine can load."""

    source: str
    """Its folder or Hub id."""
    described: str
    """For display: the name that was given, and the step if it is from a run."""
    run: Path | None = None
    """The run that it was trained in, if a run was named."""
    role: str | None = None
    """Its role in the run."""
    step: int | None = None
    """The step whose checkpoint it is from; None for the model of a run that is done."""


@contextmanager
def trained_model(
    named: str, role: str | None = None, step: int | None = None
) -> Iterator[TrainedModel]:
    """The model of a folder, a Hub id, a checkpoint or a run: a run's newest unless `step` is
    given, its actor unless `role` is. Shards written by several ranks are combined in a temporary
    folder, where the weights of a checkpoint also get the names of transformers.

    Raises UsageError, ModelError.
    """
    from rlcli.checkpoint.role_folders import check_digests, find_role
    from rlcli.checkpoint.verify import step_of

    path = named_folder(Path(named).expanduser())
    is_local = path.exists() or step_of(path) is not None
    if not is_local and HUB_ID.fullmatch(named):
        if role is not None or step is not None:
            raise UsageError(f"{named} is a model of the Hub: --role and --step do not apply")
        yield TrainedModel(named, named)
        return
    role_folder = find_role(path, role, step)
    check_digests(role_folder)
    described = (
        named
        if role_folder.step is None
        else f"{named}, {role_folder.role} of step {role_folder.step}"
    )
    run = path if (path / RESOLVED_RECIPE).is_file() else None
    with temporary_folder("model-") as home:
        folder = _as_published(role_folder, home / "model")
        yield TrainedModel(str(folder), described, run, role_folder.role, role_folder.step)


def _as_published(role_folder: RoleFolder, target: Path) -> Path:
    """The folder of a model in one piece, with the names of transformers; the target, if shards of
    several ranks had to be combined there, or experts, which a checkpoint has in one tensor,
    separated."""
    from rlcli.checkpoint import convert

    folder = role_folder.folder
    is_sharded = any(folder.glob(PARTS))
    if not is_sharded and role_folder.checkpoint is None:
        return folder
    plan = convert.plan_to_hf(folder, target)
    if not is_sharded and not plan.changes_names:
        return folder
    task = "combining the shards of the model" if is_sharded else "separating the experts"
    with doing(task, plan.bytes, BYTES) as work:
        convert.convert(plan, work.advance)
    return target
