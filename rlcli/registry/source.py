"""Reads Python source without running it: what a module binds,
and where a name is really defined."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from rlcli.errors import ProjectError
from rlcli.project import (
    FOLDERS,
    NESTED,
    PACKAGE,
    component_folders,
    module_place,
    package_of,
    search_path,
    search_paths_kept,
)

P = ParamSpec("P")
T = TypeVar("T")

_MAX_HOPS = 32
"""Re-exports and aliases followed before a name counts as unknown; more is a cycle."""


State = tuple[int, int] | None
"""Fingerprint of a file, or of the files in a folder: time and size; None if it does not exist."""

_READ: ContextVar[dict[Path, State]] = ContextVar("_READ")
"""The files read so far by a cached function, with their state at that time."""

Results = dict[object, tuple[dict[Path, State], T]]
"""Folders and a call → what it has read, and its result."""


@dataclass(frozen=True, eq=False)
class Module:
    """One source file: its classes, its aliases (`Names = list[str]`)
    and the origins of its imports."""

    name: str
    path: Path
    tree: ast.Module
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    aliases: dict[str, ast.expr] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    """Local name to dotted origin: `model_api` to `rlcli.api.model`."""


@dataclass(frozen=True)
class Definition:
    """A class, or the expression behind an alias, in the module that defines it."""

    module: Module
    name: str
    node: ast.ClassDef | ast.expr


def read_module(name: str, path: Path) -> Module:
    """Parse a source file; a syntax error in it is reported as the user's."""
    status = path.stat()
    time, size = status.st_mtime_ns, status.st_size
    if (read := _READ.get(None)) is not None:
        read[path] = time, size
    return _read_module(name, path, time, size)


@functools.lru_cache(maxsize=256)
def _read_module(name: str, path: Path, mtime: int, size: int) -> Module:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL byte, an unknown encoding
        where = (
            f"{path}:{error.lineno}"
            if isinstance(error, SyntaxError) and error.lineno
            else str(path)
        )
        raise ProjectError(f"not valid Python: {error}", where=where) from error
    module = Module(name, path, tree)
    for statement in top_level(tree.body):
        _bind(module, statement)
    return module


def kept_while_unchanged(function: Callable[P, T]) -> Callable[P, T]:
    """Cache a function of names that reads source: a result is kept as long as neither a file that
    was read nor a folder of components has changed. Contracts build the same component hundreds of
    times."""
    results: Results[T] = {}

    @functools.wraps(function)
    def cached(*args: P.args, **kwargs: P.kwargs) -> T:
        with search_paths_kept() as cache:
            call = (function, args, *kwargs.items())
            if call not in cache:
                cache[call] = _up_to_date(results, call, lambda: function(*args, **kwargs))
            result: T = cache[call]
            return result

    return cached


def _up_to_date(results: Results[T], call: object, compute: Callable[[], T]) -> T:
    """The result of a call; computed again if any source that it has read has changed."""
    folders = tuple(folder for kind in (*FOLDERS, *NESTED) for folder in component_folders(kind))
    if (folders, call) in results:
        states, result = results[folders, call]
        if all(_state(path) == state for path, state in states.items()):
            return result
    read = {folder: _state(folder) for folder in folders}
    token = _READ.set(read)
    try:
        result = compute()
    finally:
        _READ.reset(token)
    results[folders, call] = read, result
    return result


def _state(path: Path) -> State:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def dotted(module: Module, node: ast.expr) -> str | None:
    """The full name that `Name` or `a.b.Name` stands for in a module;
    None for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    head = node.id
    if head in module.imports:
        head = module.imports[head]
    elif head in module.classes or head in module.aliases:
        head = f"{module.name}.{head}"
    return ".".join([head, *parts])


def find(full_name: str) -> Definition | None:
    """The definition behind a full name, through re-exports; None if it is outside rlcli."""
    for _ in range(_MAX_HOPS):
        module_name, _, name = full_name.rpartition(".")
        path = _file_of(module_name)
        if path is None:
            return None
        module = read_module(module_name, path)
        if name in module.classes:
            return Definition(module, name, module.classes[name])
        if name in module.aliases:
            return Definition(module, name, module.aliases[name])
        if name not in module.imports:
            return None
        full_name = module.imports[name]
    return None


def _file_of(module: str) -> Path | None:
    """The file of a module of rlcli or of a component."""
    package, *parts = module.split(".")
    if package != "rlcli":
        return None
    folders = [PACKAGE]
    if len(parts) > 1 and parts[0] in FOLDERS:
        folders = [Path(folder) for folder in search_path(parts.pop(0))]
    for folder in folders:
        stem = folder.joinpath(*parts)
        for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
            if path.is_file():
                return path
    return _installed_file(_installed_name(module))


def imported_name(module: Module) -> str:
    """The name that Python imports a module by. `signature` puts the package of its kind before
    that of a component named by its module."""
    name = _installed_name(module.name)
    return name if _installed_file(name) == module.path else module.name


def _installed_name(module: str) -> str:
    packages = (f"{package_of(kind)}." for kind in (*NESTED, *FOLDERS))  # the inner ones first
    package = next((package for package in packages if module.startswith(package)), "")
    return module.removeprefix(package)


def _installed_file(module: str) -> Path | None:
    """The file of an installed module that is in a package, as such a component is."""
    path = module_place(module) if "." in module else None
    return path / "__init__.py" if path is not None and path.is_dir() else path


def top_level(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a module, including those inside `if TYPE_CHECKING:` and `try:`."""
    statements: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If):
            statements += top_level(statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            handlers = [line for handler in statement.handlers for line in handler.body]
            statements += top_level(
                statement.body + handlers + statement.orelse + statement.finalbody
            )
        else:
            statements.append(statement)
    return statements


def _bind(module: Module, statement: ast.stmt) -> None:
    match statement:
        case ast.ClassDef(name=name):
            module.classes[name] = statement
        case ast.Import(names=aliases):
            for alias in aliases:
                head = alias.name.split(".")[0]
                module.imports[alias.asname or head] = alias.name if alias.asname else head
        case ast.ImportFrom(module=origin, names=aliases, level=level):
            package = _package(module, level) if level else ""
            prefix = ".".join(name for name in (package, origin) if name)
            for alias in aliases:
                module.imports[alias.asname or alias.name] = f"{prefix}.{alias.name}"
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            module.aliases[name] = value
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            module.aliases[name] = value


def _package(module: Module, level: int) -> str:
    """The package that `from .` (level 1) or `from ..` (level 2) refers to in a module."""
    parts = module.name.split(".")
    if module.path.name == "__init__.py":
        parts.append("")
    return ".".join(parts[:-level])
