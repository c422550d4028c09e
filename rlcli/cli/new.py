"""`rlcli new`: a working component, recipe or project as a starting point."""

from __future__ import annotations

import os
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli.arguments import AsJson, DryRun
from rlcli.cli.output import print_json, print_table, print_talk
from rlcli.errors import ProjectError, UsageError

if TYPE_CHECKING:
    from rlcli.scaffold import Scaffold


class NewKind(StrEnum):
    """The kinds of things that can be created."""

    DATASET = "dataset"
    ENVIRONMENT = "environment"
    INTERFACE = "interface"
    REWARD = "reward"
    ESTIMATOR = "estimator"
    BACKEND = "backend"
    RECIPE = "recipe"
    FAMILY = "family"
    PROJECT = "project"


def new(
    kind: Annotated[
        NewKind,
        typer.Argument(
            metavar="KIND",
            help=(
                "dataset, environment, interface, reward, estimator, backend, recipe, family "
                "or project."
            ),
        ),
    ],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Its name; of a project, its folder.")
    ],
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="INTERFACE", help="Start from a copy of this interface."),
    ] = None,
    without_answer: Annotated[
        bool,
        typer.Option("--without-answer", help="A reward that does not look at the row's answer."),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Create a component, a recipe or a project: working files with a passing test.
    Nothing is overwritten.

    Example: rlcli new project my-project
    """
    from rlcli.scaffold import write
    from rlcli.scaffold.files import refuse_existing

    scaffold = _planned(kind, name, like, without_answer)
    (refuse_existing if dry_run else write)(scaffold)
    following = _following(scaffold)
    if as_json:
        files = [
            {"path": _shown(file.path), "about": file.about, "text": file.text}
            for file in scaffold.files
        ]
        print_json({"written": not dry_run, "files": files, "next": following})
        return
    print_talk(f"{'would write' if dry_run else 'wrote'} into {scaffold.root}:")
    print_table(
        ["file", "what it is"], [(_shown(file.path), file.about) for file in scaffold.files]
    )
    print_talk(
        "nothing was written: --dry-run"
        if dry_run
        else f"then {scaffold.first_step}\nnext: {following}"
    )


def _planned(kind: NewKind, name: str, like: str | None, without_answer: bool) -> Scaffold:
    from rlcli.scaffold import plan, plan_project

    if kind is not NewKind.PROJECT:
        return plan(kind.value, name, _project(), like, without_answer)
    if like is not None or without_answer:
        option = "--like copies an interface" if like else "--without-answer is for a reward"
        raise UsageError(f"{option}, not a project", hint=f"rlcli new project {name}")
    return plan_project(Path(name))


def _project() -> Path:
    from rlcli.project import current_project

    project = current_project()
    if project is None:
        hint = "make one: rlcli new project DIR; or name yours: rlcli --project DIR new …"
        raise ProjectError(f"{Path.cwd()} is not inside an rlcli project", hint=hint)
    return project


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _following(scaffold: Scaffold) -> str:
    """The command to run next, from the user's working directory."""
    if scaffold.root == Path.cwd().resolve():
        return scaffold.command
    return f"cd {shlex.quote(os.path.relpath(scaffold.root))} && {scaffold.command}"
