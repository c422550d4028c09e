"""Where the model of a role is: in a run, in one of its checkpoints, or in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlcli.api.run_folder import CHECKPOINTS, STATUS, is_run, newest_run_in
from rlcli.checkpoint.manifest import MANIFEST, read_manifest
from rlcli.checkpoint.verify import checkpoints_in, examine, step_of
from rlcli.errors import ModelError, UsageError
from rlcli.files import known_object

MODELS = "models"
USUAL = "actor"
"""The default role if none is given."""
OTHER = "another checkpoint of the run may be intact: --step"


@dataclass(frozen=True)
class RoleFolder:
    """A model's folder."""

    folder: Path
    role: str | None = None
    checkpoint: Path | None = None
    """The checkpoint that it is a part of."""
    step: int | None = None


def find_role(source: Path, role: str | None = None, step: int | None = None) -> RoleFolder:
    """The model that a user means: of a run, the newest unless `step` is given;
    of several roles, the actor.

    Raises UsageError, ModelError.
    """
    if not source.is_dir():
        raise _missing(source)
    if (source / "config.json").is_file():
        if role is not None or step is not None:
            option = "--role" if role is not None else "--step"
            raise UsageError(
                f"{source} is a model's folder: {option} does not apply",
                hint=f"leave out {option}",
            )
        return _described(source)
    if (source / MANIFEST).is_file() or step_of(source) is not None:
        if step is not None:
            raise UsageError(
                f"{source} is a single checkpoint: --step does not apply",
                hint="leave out --step",
            )
        return _in_checkpoint(source, role)
    if is_run(source) or (source / CHECKPOINTS).is_dir() or (source / MODELS).is_dir():
        return _in_run(source, role, step)
    if (newest := newest_run_in(source)) is not None:
        raise ModelError(f"{source} is a folder of runs", hint=f"the newest is {newest}")
    raise ModelError(
        f"{source} is neither a run, nor a checkpoint, nor a model's folder",
        hint="a run has checkpoints/ or models/, a model's folder has config.json",
    )


def check_digests(role_folder: RoleFolder) -> int:
    """Read every file of a role that is part of a checkpoint; returns how many there are.

    Raises ModelError: F17, F18, F20 for one that does not match its manifest.
    """
    if role_folder.checkpoint is None:
        return 0
    prefix = role_folder.folder.relative_to(role_folder.checkpoint).as_posix() + "/"
    report = examine(role_folder.checkpoint, under=prefix)
    for fault in report.faults:
        raise ModelError(fault.what, where=fault.where, hint=OTHER, code=fault.code)
    assert report.manifest is not None
    return sum(path.startswith(prefix) for path in report.manifest.files)


def _in_run(run: Path, role: str | None, step: int | None) -> RoleFolder:
    checkpoints = _by_step(run / CHECKPOINTS)
    if step is not None:
        if step not in checkpoints:
            raise _no_step(run, step, checkpoints)
        return _in_checkpoint(checkpoints[step], role)
    has_models = any((run / MODELS).glob("*/config.json"))
    if has_models and (_is_done(run) or not checkpoints):
        return RoleFolder(_role_in(run / MODELS, role), _role_in(run / MODELS, role).name)
    if not checkpoints:
        raise ModelError(f"{run} has neither a checkpoint nor a model yet")
    return _in_checkpoint(checkpoints[max(checkpoints)], role)


def _missing(source: Path) -> UsageError:
    step = step_of(source)
    if step is not None and source.parent.is_dir():
        return _no_step(source.parent, step, _by_step(source.parent))
    hint = "a model of the Hub is fetched by: hf download NAME"
    return UsageError(f"there is no folder {source}", hint=hint)


def _by_step(folder: Path) -> dict[int, Path]:
    paths = checkpoints_in(folder)
    return {step: path for path in paths if (step := step_of(path)) is not None}


def _no_step(folder: Path, step: int, present: Iterable[int]) -> UsageError:
    steps = ", ".join(map(str, sorted(present))) or "none"
    return UsageError(f"{folder} has no checkpoint of step {step}", hint=f"there are: {steps}")


def _in_checkpoint(checkpoint: Path, role: str | None) -> RoleFolder:
    manifest = read_manifest(checkpoint)
    folder = _role_in(checkpoint / MODELS, role)
    return RoleFolder(folder, folder.name, checkpoint, manifest.step)


def _described(folder: Path) -> RoleFolder:
    """A role's folder that the user named directly; it may still be part of a checkpoint."""
    checkpoint = folder.absolute().parent.parent
    if folder.absolute().parent.name == MODELS and (checkpoint / MANIFEST).is_file():
        return RoleFolder(
            folder.absolute(), folder.name, checkpoint, read_manifest(checkpoint).step
        )
    return RoleFolder(folder)


def _role_in(models: Path, role: str | None) -> Path:
    roles = sorted(path.parent.name for path in models.glob("*/config.json"))
    if not roles:
        raise ModelError(f"{models} holds no model")
    if role is None:
        role = roles[0] if len(roles) == 1 else USUAL
    if role not in roles:
        raise UsageError(
            f"there is no role {role} in {models}", hint=f"--role is one of {', '.join(roles)}"
        )
    return models / role


def _is_done(run: Path) -> bool:
    """Whether the run came to its end, after which its models are newer than any checkpoint."""
    return known_object(run / STATUS).get("state") == "done"
