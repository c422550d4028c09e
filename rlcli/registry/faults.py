"""Exceptions that passed through a component of the user: reported as the component's, with their
line there."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rlcli.errors import ProjectError, RlcliError, WorkerError
from rlcli.project import component_folders, is_built_in
from rlcli.registry import KINDS


@contextmanager
def attribute_user_errors() -> Iterator[None]:
    """Convert an exception that passed through a user's component into ProjectError with the
    innermost line there; leave others unchanged. SystemExit and the like count as exceptions: no
    component may end a run. If a component forked this process, the copy is ended here, so that it
    does not continue the run as well."""
    process = os.getpid()
    try:
        yield
    except ProjectError as error:
        if error.where is None and (innermost := _innermost_line(error)) is not None:
            error.where = innermost.where
        raise
    except RlcliError:
        raise
    except BaseException as error:
        is_ours = _is_ctrl_c(error) or _innermost_line(error) is None
        if is_ours and not isinstance(error, SystemExit):
            raise
        raise fault(error) from error
    finally:
        if os.getpid() != process:
            os._exit(1)


def _is_ctrl_c(error: BaseException) -> bool:
    """A run has its own handlers for SIGINT; where it has none, KeyboardInterrupt is the user's."""
    return (
        isinstance(error, KeyboardInterrupt)
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def fault(error: BaseException) -> RlcliError:
    """The error to report for an exception: the component's, with its innermost line there, or else
    that of the run."""
    message = f"{type(error).__name__}: {_words(error)}".rstrip(": ")
    innermost = _innermost_line(error)
    if innermost is None:
        *_, (frame, number) = traceback.walk_tb(error.__traceback__)
        where = f"{frame.f_code.co_filename}:{number}"
        return WorkerError(message, where=where, hint="only rlcli itself may end its process")
    kind, file, _ = innermost
    alone = (
        ""
        if file.stem.startswith("_")
        else f"rlcli test {kind.removesuffix('s')} {file.stem} tries it alone; "
    )
    return ProjectError(
        message, where=innermost.where, hint=f"{alone}--debug before the verb shows the traceback"
    )


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"its text is unavailable ({type(second).__name__})"


class Line(NamedTuple):
    """A line of a user's component."""

    kind: str
    file: Path
    number: int

    @property
    def where(self) -> str:
        return f"{self.file}:{self.number}"


def _innermost_line(error: BaseException) -> Line | None:
    """The innermost line of an exception's traceback that is in a user's component."""
    folders = {
        folder: kind
        for kind in KINDS
        for folder in component_folders(kind)
        if not is_built_in(folder)
    }
    frames = (
        (Path(frame.f_code.co_filename), number)
        for frame, number in traceback.walk_tb(error.__traceback__)
    )
    lines = [
        Line(folders[file.parent], file, number)
        for file, number in frames
        if file.parent in folders
    ]
    return lines[-1] if lines else None
