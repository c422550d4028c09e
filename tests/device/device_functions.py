"""Finds functions that deal with devices, by their source, and functions that have run."""

from __future__ import annotations

import ast
import contextlib
import cProfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

_MAKERS = frozenset((
    "arange", "as_tensor", "empty", "eye", "frombuffer", "from_numpy", "full", "linspace", "ones",
    "rand", "randint", "randn", "randperm", "tensor", "zeros",
))  # fmt: skip
"""Torch functions that create a tensor, on the host unless given a device."""
_MOVES = frozenset(("cpu", "cuda", "is_cuda", "numpy", "pin_memory", "to", "type_as"))
_DEVICES = frozenset(("cpu", "cuda"))


@dataclass(frozen=True, order=True)
class Function:
    """A function, by its source file and its qualified name: `FSDPEngine._move`."""

    file: str
    name: str

    def __str__(self) -> str:
        return f"{self.file} {self.name}"


def device_functions(files: Iterable[Path], root: Path) -> set[Function]:
    """Functions whose own lines name a device (a variable, argument or attribute `device`, the
    words "cuda" and "cpu"), move a tensor (`.to(…)`, `.cpu()`), or create one. Files are named
    relative to `root`."""
    functions: set[Function] = set()
    for file in files:
        for name, function in _functions(ast.parse(file.read_text(encoding="utf-8"))):
            if any(_knows_devices(node) for node in _own_nodes(function)):
                functions.add(Function(str(file.relative_to(root)), name))
    return functions


@contextlib.contextmanager
def functions_run(root: Path) -> Iterator[set[Function]]:
    """The functions in files beneath `root` that this thread enters within the context."""
    run: set[Function] = set()
    # in C: a trace function in Python takes far longer
    profiler = cProfile.Profile(subcalls=False, builtins=False)
    profiler.enable()
    try:
        yield run
    finally:
        profiler.disable()
        for entry in profiler.getstats():
            assert isinstance(entry.code, CodeType)
            file = Path(entry.code.co_filename)
            if file.is_relative_to(root):
                run.add(Function(str(file.relative_to(root)), entry.code.co_qualname))


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
            yield from _functions(node, f"{prefix}{node.name}.<locals>.")
        else:
            yield from _functions(
                node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix
            )


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Nodes outside nested functions and classes; lambdas count as its own."""
    waiting = [
        node for node in ast.iter_child_nodes(function) if not isinstance(node, ast.arguments)
    ]
    waiting += ast.iter_child_nodes(function.args)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node
            waiting += ast.iter_child_nodes(node)


def _knows_devices(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in _MAKERS:
            return True
        case ast.Attribute(attr=name):
            return name in _MOVES or name.strip("_") == "device"
        case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            return name.strip("_") == "device"
        case ast.Constant(value=str(text)):
            return text in _DEVICES
    return False
