"""Decides whose fault an exception is: one raised in a user's component is reported with its place."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcli.errors import ProjectError, RlcliError, WorkerError
from rlcli.project import component_folders, is_built_in
from rlcli.registry import KINDS


@contextmanager
def attribute_user_errors() -> Iterator[None]:
    """Convert an exception that passed through a user's component into ProjectError with the innermost line there;
    leave others unchanged. SystemExit and the like count as exceptions: no component may end a run. If a component
    forked this process, the copy is ended here, so that it does not continue the run as well."""
    process = os.getpid()
    try:
        yield
    except ProjectError as error:
        if error.where is None and (place := _place_in_a_component(error)) is not None:
            error.where = f"{place[1]}:{place[2]}"
        raise
    except RlcliError:
        raise
    except SystemExit as error:
        raise fault(error) from error
    except BaseException as error:
        if _is_ctrl_c(error) or _place_in_a_component(error) is None:
            raise
        raise fault(error) from error
    finally:
        if os.getpid() != process:
            os._exit(1)


def _is_ctrl_c(error: BaseException) -> bool:
    """A run has its own handlers for SIGINT; where it has none, KeyboardInterrupt is the user's."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def fault(error: BaseException) -> RlcliError:
    """The error to report for an exception: the component's, with its innermost line there, or else that of the run."""
    place = _place_in_a_component(error)
    message = f"{type(error).__name__}: {_words(error)}".rstrip(": ")
    if place is None:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        return WorkerError(
            message, where=f"{frame.f_code.co_filename}:{line}", hint="only rlcli itself may end its process"
        )
    kind, file, line = place
    alone = "" if file.stem.startswith("_") else f"rlcli test {kind.removesuffix('s')} {file.stem} tries it alone; "
    return ProjectError(message, where=f"{file}:{line}", hint=f"{alone}--debug before the verb shows the traceback")


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:
        return f"its text cannot be made ({type(another).__name__})"


def _place_in_a_component(error: BaseException) -> tuple[str, Path, int] | None:
    """Kind, file and line of the innermost frame in a user's component."""
    folders = {folder: kind for kind in KINDS for folder in component_folders(kind) if not is_built_in(folder)}
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if file.parent in folders:
            found = folders[file.parent], file, line
    return found
