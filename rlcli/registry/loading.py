"""From a name to a class, and from a class and a recipe's arguments to a component."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.api.component import module_name, registered
from rlcli.api.config import (
    DatasetAbstraction,
    EnvironmentAbstraction,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
)
from rlcli.api.dataset import with_rows
from rlcli.errors import ProjectError, RlcliError, UsageError
from rlcli.project import NESTED, package_of, search_path, search_paths_kept
from rlcli.registry.listing import module_of, path_of
from rlcli.registry.requirements import missing_libraries
from rlcli.registry.signature import signature

if TYPE_CHECKING:
    from rlcli.api.environment import Environment
    from rlcli.api.model import ModelBackend, ModelInterface


def load(kind: str, name: str) -> type:
    """The class of a component. Imports only its file. Raises ResourceError if a library that it
    requires is not installed."""
    path = path_of(kind, name)
    try:
        described = signature(kind, name)
    except ProjectError:
        if "." in name:  # a module that is not a component is not imported
            raise
        # importing the file gives a better error
    else:
        for error in missing_libraries(described):
            raise error
    _import_file(kind, path, module_of(kind, name))
    classes_by_name = {
        key: cls for key, cls in registered(kind).items() if module_name(key) == module_name(name)
    }
    classes = list(dict.fromkeys(classes_by_name.values()))
    if not classes:
        raise ProjectError(
            f"the file registers no {kind.removesuffix('s')} named {path.stem!r}",
            where=str(path),
            hint=f"end it with register_{kind.removesuffix('s')}({path.stem!r}, TheClass)",
        )
    if len(classes) > 1:
        raise ProjectError(
            (
                f"the file registers {', '.join(map(repr, classes_by_name))}; it "
                "must register one class"
            ),
            where=str(path),
        )
    return classes[0]


def load_declared(kind: str, name: str, constant: str) -> Any:
    """The object a component's class names in a literal, `_file.attribute` of a sibling file; None
    if it names none.

    Imports that file, not the component's. Raises ProjectError if there is no such file or
    attribute.
    """
    described = signature(kind, name)
    target = described.constants.get(constant)
    if target is None:
        return None
    file, _, attribute = str(target).rpartition(".")
    candidates = (Path(folder) / f"{file}.py" for folder in search_path(kind))
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    module = f"{package_of(kind)}.{file}"
    if path is not None and file.isidentifier():
        _import_file(kind, path, module)
        declared = getattr(sys.modules[module], attribute, None)
        if declared is not None:
            return declared
    raise ProjectError(
        (
            f"{constant} of {described.class_name} is {target!r}; there is no such "
            f"{'attribute' if path else 'file'}"
        ),
        where=f"{described.path}:{described.line}",
        hint=f"it names what a file in {kind}/ defines, such as _my_file.MyClass",
    )


def make_interface(cfg: ModelInterfaceAbstraction) -> ModelInterface:
    """Build the interface described by `interface: {type: …, args: {…}}`."""
    return _make("interfaces", cfg.type_, cfg.args)


def make_backend(cfg: ModelBackendAbstraction) -> ModelBackend:
    """Build the backend described by `backend: {type: …, args: {…}}`."""
    return _make("backends", cfg.type_, cfg.args)


def make_dataset(cfg: DatasetAbstraction, util: Any) -> Any:
    """Build the dataset described by `{type: …, args: {…}}`; `util` is its `DatasetUtility`."""
    return with_rows(_make("datasets", cfg.type_, cfg.args, util=util))


def make_environment(cfg: EnvironmentAbstraction) -> Environment:
    """Build the environment described by `environment: …, environment_args: {…}`."""
    return environment_maker(cfg)()


def environment_maker(cfg: EnvironmentAbstraction) -> Callable[[], Environment]:
    """A function that makes a new instance with each call; the class and its arguments are looked
    up once."""
    return _maker("environments", cfg.type_, cfg.args)


def _make(kind: str, name: str, args: Mapping[str, Any], **context: Any) -> Any:
    return _maker(kind, name, args)(**context)


def _maker(kind: str, name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    from rlcli.registry.arguments import construct, validated

    owner = f"{kind.removesuffix('s')} {name}"
    with search_paths_kept():
        cls = load(kind, name)
        arguments = validated(kind, name, args)

    def make(**context: Any) -> Any:
        values = construct(arguments, owner=owner)
        try:
            return cls(**context, **values)
        except ValueError as error:
            raise UsageError(f"{owner}: {error}") from error

    return make


def _import_file(kind: str, path: Path, name: str) -> None:
    """Import a component's file as the module `name`: through its kind's package, or as an
    installed module."""
    outer = NESTED.get(kind, kind)
    door = importlib.import_module(f"rlcli.{outer}")
    folders = search_path(outer)
    if list(door.__path__) != folders:  # the project became known after the package was imported
        door.__path__ = folders
        importlib.invalidate_caches()
    loaded = sys.modules.get(name)
    if loaded is not None and Path(str(loaded.__file__)).resolve() != path.resolve():
        raise ProjectError(
            f"this process already uses {loaded.__file__}",
            where=str(path),
            hint="start a new process",
        )
    try:
        importlib.import_module(name)
    except RlcliError as error:
        error.where = error.where or _place(path, _frames_from(path, error), error)
        raise
    except Exception as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> ProjectError:
    """The full error inside a component's file, starting at that file."""
    report = traceback.TracebackException.from_exception(error)
    report.stack = traceback.StackSummary.from_list(_frames_from(path, error))
    text = "".join(report.format()).rstrip()
    return ProjectError(
        f"the file cannot be imported\n{text}", where=_place(path, report.stack, error)
    )


def _frames_from(path: Path, error: Exception) -> list[traceback.FrameSummary]:
    """The frames of an error from the first one in that file on; none if it has no such frame."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if Path(frame.filename) == path), len(frames))
    return frames[first:]


def _place(path: Path, frames: list[traceback.FrameSummary], error: Exception) -> str:
    """The line of the first frame, or the one that a syntax error names."""
    line = frames[0].lineno if frames else getattr(error, "lineno", None)
    return f"{path}:{line}" if line else str(path)
