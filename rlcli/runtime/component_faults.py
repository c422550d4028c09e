"""Whose mistake an exception is: one raised in a user's component is reported with its place."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcli.errors import ProjectError, RlcliError, WorkerError
from rlcli.project import is_built_in, search_path
from rlcli.registry import KINDS


@contextmanager
def component_faults_told() -> Iterator[None]:
    """An exception that went through a component which is not built in, as ProjectError with the innermost line there;
    what else goes wrong, as it is. SystemExit and its like are exceptions here: no component may end a run. Nor may a
    copy of this process that a component forked continue the run next to it: the copy ends here.
    """
    process = os.getpid()
    try:
        yield
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
    """A run has handlers of its own for SIGINT; where it has none, KeyboardInterrupt is the user's."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def fault(error: BaseException) -> RlcliError:
    """The error to report for an exception: the component's with its innermost line there; else that of the run."""
    place = _place_in_a_component(error)
    what = f"{type(error).__name__}: {_words(error)}".rstrip(": ")
    if place is None:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        return WorkerError(
            what, where=f"{frame.f_code.co_filename}:{line}", hint="only rlcli itself may end its process"
        )
    kind, file, line = place
    alone = "" if file.stem.startswith("_") else f"rlcli test {kind.removesuffix('s')} {file.stem} tries it alone; "
    return ProjectError(what, where=f"{file}:{line}", hint=f"{alone}--debug before the verb shows the traceback")


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:
        return f"its text cannot be made ({type(another).__name__})"


def _place_in_a_component(error: BaseException) -> tuple[str, Path, int] | None:
    """Kind, file and line of the innermost frame in a component of the user's."""
    folders = {Path(folder): kind for kind in KINDS for folder in search_path(kind) if not is_built_in(Path(folder))}
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if file.parent in folders:
            found = folders[file.parent], file, line
    return found
