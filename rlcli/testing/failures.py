"""Turns an exception in a check into what was observed,
its likely cause and the line to look at."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING

from rlcli.errors import RlcliError
from rlcli.recipe.parsing.finding import shown
from rlcli.testing.contract import FailedElsewhere, TimeIsUp, Violation
from rlcli.testing.results import CheckFailure

if TYPE_CHECKING:
    import pytest

MOST_LINES = 12
"""Most lines kept of an exception's message."""


def failure_of(
    caught: pytest.ExceptionInfo[BaseException], files: Sequence[Path], traceback: str
) -> CheckFailure:
    """`files`: where to look for a line, the component's own first."""
    error = caught.value
    finding, cause, where = _said(error) or str(caught.traceback[-1].statement).strip(), "", ""
    if isinstance(error, Violation):
        finding, cause, where = error.finding, error.cause, error.where
    elif isinstance(error, TimeIsUp):
        finding, cause = str(error), "something waits, or loops, forever"
    elif isinstance(error, RlcliError):
        cause, where = error.hint or "", error.where or ""
    where = where or _innermost([*_frames(error), *_frames_told(_message(error))], files)
    return CheckFailure(finding, cause, _short(where), traceback)


def _said(error: BaseException) -> str:
    """The message of an exception; empty for a bare assertion."""
    if isinstance(error, RlcliError):
        return error.what
    if isinstance(error, FailedElsewhere):
        return error.problem
    lines = _message(error).strip().splitlines()
    text = "\n".join([*lines[:MOST_LINES], *(["…"] if len(lines) > MOST_LINES else [])])
    is_plain = isinstance(error, AssertionError) or type(error).__module__.startswith(
        ("_pytest", "pytest")
    )
    return text if is_plain else f"{type(error).__name__}: {text}".removesuffix(": ")


def _message(error: BaseException) -> str:
    """Of an exception of a component, whose `__str__` may fail too."""
    try:
        return str(error)
    except Exception:
        return "<its message cannot be shown: __str__ failed>"


def _frames(error: BaseException | None) -> list[tuple[Path, int]]:
    """The frames of an exception and its causes, the deepest last."""
    frames: list[tuple[Path, int]] = []
    while error is not None:
        frames += [
            (Path(frame.filename), frame.lineno or 0) for frame in extract_tb(error.__traceback__)
        ]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return frames


def line_in(error: BaseException, files: Sequence[Path]) -> str:
    """`file:line` of the deepest frame of an exception in the first of the files that has one, of
    which a folder stands for all files below it; empty if none has."""
    return _innermost(_frames(error), files)


def _frames_told(text: str) -> list[tuple[Path, int]]:
    """The frames of another process's traceback, received as text."""
    return [
        (Path(file), int(line)) for file, line in re.findall(r'File "([^"\n]+)", line (\d+)', text)
    ]


def _innermost(frames: Iterable[tuple[Path, int]], files: Sequence[Path]) -> str:
    """The deepest frame in the first of the files that has one;
    a folder stands for all files below it."""
    resolved = [(path.resolve(), line) for path, line in frames]
    for file in files:
        locations = [
            f"{path}:{line}" for path, line in resolved if path.is_relative_to(file.resolve())
        ]
        if locations:
            return locations[-1]
    return ""


def _short(where: str) -> str:
    """A location relative to the working directory."""
    file, colon, line = where.rpartition(":")
    if not colon or not Path(file).is_absolute():
        return where
    return f"{shown(Path(file))}:{line}"
