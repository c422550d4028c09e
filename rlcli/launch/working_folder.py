"""Where a run was started: its working directory, and its project."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcli.api.run_folder import ENVIRONMENT
from rlcli.files import known_object
from rlcli.project import VARIABLE, check_not_planted, planted


@contextmanager
def in_its_folder(run_dir: Path, verb: str, say: Callable[[str], None]) -> Iterator[None]:
    """Work in the folder that the run was started in, where its relative paths and its project are;
    then return. A run that another user may have planted works in the user's current folder, in the
    project that was named. `verb`: of the command. Raises ProjectError if another user may have
    planted the project.
    """
    record = run_dir / ENVIRONMENT
    environment = known_object(record) if planted(record) is None else {}
    project = _recorded_project(environment)
    if project is not None:
        marker = Path(project).expanduser() / "pyproject.toml"
        check_not_planted(
            marker, f"the code of project {project}", f"--project {project} {verb} {run_dir}"
        )
    folder, here = environment.get("working_directory"), Path.cwd()
    if isinstance(folder, str) and Path(folder).is_dir() and Path(folder) != here:
        say(f"working in {folder}, where the run was started")
        os.chdir(folder)
    try:
        if project is not None:
            os.environ[VARIABLE] = project
        yield
    finally:
        os.chdir(here)
        if project is not None:
            os.environ.pop(VARIABLE, None)


def _recorded_project(environment: Mapping[str, Any]) -> str | None:
    """The project that a run was started with; None if it was none, or the user names one now."""
    variables = environment.get("variables")
    project = variables.get(VARIABLE) if isinstance(variables, dict) else None
    if not isinstance(project, str) or not project or VARIABLE in os.environ:
        return None
    return project
