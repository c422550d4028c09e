"""Exceptions that passed through a component of the user, and what it returned that cannot be used:
reported as the component's, with a line there."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlcli.api.component import registered
from rlcli.api.dataflow import MFCDef
from rlcli.errors import NumericError, ProjectError, RlcliError, WorkerError
from rlcli.project import component_folders, is_built_in
from rlcli.registry import KINDS
from rlcli.registry.listing import path_of

UNUSABLE = "F54"
"""Code of the fault that a component returned something that cannot be used."""


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
    kind, name, *_ = innermost
    alone = (
        ""
        if name.startswith("_")
        else f"rlcli test {kind.removesuffix('s')} {name} tries it alone; "
    )
    return ProjectError(
        message, where=innermost.where, hint=f"{alone}--debug before the verb shows the traceback"
    )


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"its text is unavailable ({type(second).__name__})"


class SourceLine(NamedTuple):
    """A line of a user's component."""

    kind: str
    name: str
    file: Path
    number: int

    @property
    def where(self) -> str:
        return f"{self.file}:{self.number}"


def _innermost_line(error: BaseException) -> SourceLine | None:
    """The innermost line of an exception's traceback that is in a user's component."""
    folders = {
        folder: kind
        for kind in KINDS
        for folder in component_folders(kind)
        if not is_built_in(folder)
    }
    named_by_module = _files_of_installed()
    innermost = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if file in named_by_module:
            innermost = SourceLine(*named_by_module[file], file, number)
        elif file.parent in folders:
            innermost = SourceLine(folders[file.parent], file.stem, file, number)
    return innermost


def _files_of_installed() -> dict[Path, tuple[str, str]]:
    """The file of each component that is named by its module → (its kind, its name)."""
    return {
        Path(file): (kind, name)
        for kind in KINDS
        for name, cls in registered(kind).items()
        if "." in name and (file := getattr(sys.modules.get(cls.__module__), "__file__", None))
    }


@dataclass(frozen=True)
class CallOrigin:
    """A call of the graph.

    A user's component is at fault for what it returns, but for a number that is not finite only if
    it computes without a model. Where there is a model, its weights may be the cause, as with a
    loss that is not finite.
    """

    call: str
    component: str
    """`interface my_reward`, and the backend if that is the user's."""
    method: str
    where: str | None
    """File and line of the user's component; None if everything involved is built in."""
    has_model: bool
    describe: Callable[[Hashable], str]

    def malformed(self, problem: str) -> RlcliError:
        message = f"call {self.call}: {self.method} of {self.component} {problem}"
        if self.where is None:
            return RlcliError(
                message,
                hint="this is a bug in rlcli, not in the recipe: please report it",
                code=UNUSABLE,
            )
        hint = f"rlcli test {self.component.partition(' with ')[0]} tries it alone"
        return ProjectError(message, where=self.where, hint=hint, code=UNUSABLE)

    def not_finite(self, problem: str) -> RlcliError:
        if self.where is not None and not self.has_model:
            return self.malformed(problem)
        return NumericError(
            (
                f"call {self.call}: {self.method} of {self.component} {problem}; "
                "nothing was trained on it"
            ),
            where=self.where,
            hint=(
                "check this sample; if its model has just been trained, its weights may have "
                "diverged: go back to a checkpoint and lower the learning rate"
            ),
            code=UNUSABLE,
        )


def origin_of_call(
    mfc: MFCDef,
    backend: str | None,
    interface: object,
    has_model: bool,
    describe: Callable[[Hashable], str],
) -> CallOrigin:
    """The origin of a call; `backend`: that of its role, if it has one. It searches the folders of
    components, so make it once per call of a graph."""
    method, name = mfc.interface_type.value, mfc.interface_impl.type_
    component = f"interface {name}"
    where = _line_in_user_file("interfaces", name, getattr(type(interface), method, None))
    backend_file = _line_in_user_file("backends", backend) if backend is not None else None
    if backend_file is not None:
        component += f" with backend {backend}"
    return CallOrigin(mfc.name, component, method, where or backend_file, has_model, describe)


def _line_in_user_file(kind: str, name: str, function: object = None) -> str | None:
    """File and line of a component that is not built in."""
    path = path_of(kind, name)
    if is_built_in(Path(path).parent):
        return None
    code = getattr(function, "__code__", None)
    return (
        f"{path}:{code.co_firstlineno}"
        if code is not None and Path(code.co_filename) == Path(path)
        else str(path)
    )
