"""A component's arguments and methods, read from its source without importing it.

This lets `rlcli validate`, `show` and `ls` check and explain the arguments of a component that
needs torch, a GPU or a library that is not installed.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.api.component import module_name
from rlcli.api.declared_keys import inherited
from rlcli.api.limits import BOUNDS, Limits, Needs
from rlcli.errors import ProjectError
from rlcli.project import package_of
from rlcli.registry.class_fields import (
    Argument,
    annotated_names,
    arguments_of,
    class_named,
    lineage,
)
from rlcli.registry.listing import module_of, path_of
from rlcli.registry.source import (
    Definition,
    Module,
    dotted,
    kept_while_unchanged,
    read_module,
    top_level,
)
from rlcli.spelling import nearest_name

if TYPE_CHECKING:
    from pydantic import BaseModel


CALLS = ("train_step", "inference", "generate")
"""Interface methods that are called with a batch."""

LIMITS_EXAMPLE = '{"minibatches": {"ge": 1, "le": 10}}'
NEEDS_EXAMPLE = '{"gamma": "loss=sigmoid|robust"}'
ABOUT_ARGUMENTS = ("LIMITS", "NEEDS", "SYNONYMS", "ONE_OF", "FILES", "VARIABLES", "STALE_NEEDS",
                   "NO_EFFECT_WITHOUT", "NO_EFFECT_ON_NUMBERS")  # fmt: skip
"""Declarations of which every entry, in a mapping every key, names an argument."""


@dataclass(frozen=True)
class Signature:
    """A component as described by its source."""

    kind: str
    name: str
    path: Path
    line: int
    class_name: str
    doc: str
    """First paragraph of the class's docstring, on one line."""
    arguments: tuple[Argument, ...]
    """Keys that a recipe may set under `args:`; a dataset's `util` is not among them."""
    methods: frozenset[str]
    """Methods defined by the class and its bases, except those of the contract in `rlcli.api`."""
    has_unread_bases: bool
    """Whether a base class is outside rlcli, so that there may be more methods."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Class literals that are not arguments: `KEYS: ClassVar[tuple[str, ...]] = (...)`."""
    fields: frozenset[str] = frozenset()
    """The annotated fields of the class and its bases, also those that are not arguments."""

    _models: dict[tuple[str, ...], type[BaseModel]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Cache of `model`: each takes milliseconds, and contracts build a component thousands of
    times."""

    def model(self, only: Collection[str] | None = None) -> type[BaseModel]:
        """A pydantic model of the arguments: unknown keys are refused, no value is converted to
        another type. `only`: limit it to these and the required ones,
        which is all that is needed to check them."""
        from rlcli.registry.arguments import arguments_model

        arguments = [a for a in self.arguments if only is None or a.required or a.name in only]
        names = tuple(a.name for a in arguments)
        if names not in self._models:
            self._models[names] = arguments_model(self.class_name, arguments, self.limits)
        return self._models[names]

    @property
    def limits(self) -> Limits:
        """The bounds of its numbers, declared in `LIMITS`. Raises ProjectError for invalid ones."""
        limits = self.constants.get("LIMITS", {})
        if not isinstance(limits, dict):
            raise self._misdeclared(f"LIMITS of {self.class_name} is {limits!r}", LIMITS_EXAMPLE)
        for name, bounds in limits.items():
            if not isinstance(bounds, dict) or not set(bounds) <= set(BOUNDS):
                message = (
                    f"LIMITS of {self.class_name} gives {name} {bounds!r}; valid bounds "
                    f"are {', '.join(BOUNDS)}"
                )
                raise self._misdeclared(message, LIMITS_EXAMPLE)
        return limits

    @property
    def needs(self) -> Needs:
        """What its arguments need, declared in `NEEDS`. Raises ProjectError if that is no mapping
        of texts."""
        needs = self.constants.get("NEEDS", {})
        if isinstance(needs, dict) and all(map(_is_text, (*needs, *needs.values()))):
            return needs
        raise self._misdeclared(f"NEEDS of {self.class_name} is {needs!r}", NEEDS_EXAMPLE)

    def refuse_other_names(self) -> None:
        """Raise ProjectError for a declaration about an argument that the component does not have:
        it would have no effect. One about a field that a recipe does not set may be inherited."""
        if self.has_unread_bases:
            return
        arguments = [argument.name for argument in self.arguments]
        for declaration in ABOUT_ARGUMENTS:
            for name in self._names_in(declaration).difference(arguments, self.fields):
                close = nearest_name(name, arguments)
                raise ProjectError(
                    f"{declaration} of {self.class_name} names {name!r}, which is none of its "
                    "arguments",
                    where=f"{self.path}:{self.line}",
                    hint=f"did you mean {close}?" if close else f"it has {', '.join(arguments)}",
                )

    def _names_in(self, declaration: str) -> set[str]:
        if declaration == "NEEDS":
            return {text.partition("=")[0] for pair in self.needs.items() for text in pair}
        names = self.limits if declaration == "LIMITS" else self.constants.get(declaration, ())
        return set(filter(_is_text, names)) if isinstance(names, dict | tuple | list) else set()

    def _misdeclared(self, message: str, example: str) -> ProjectError:
        where = f"{self.path}:{self.line}"
        return ProjectError(message, where=where, hint=f"for example {example}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


@kept_while_unchanged
def signature(kind: str, name: str) -> Signature:
    """Read a component's signature. Raises ProjectError."""
    path = path_of(kind, name)
    module = read_module(
        f"{package_of(kind)}.{name}" if "." in name else module_of(kind, name), path
    )
    definition = _registered_class(kind, module)
    bases = list(lineage(definition))
    own_bases = [base for base in bases if base is not None and not _is_contract(base)]
    arguments = arguments_of(definition)
    if kind == "datasets":
        arguments = _without_utility(definition, arguments)
    if kind == "interfaces":
        _check_parameters(own_bases)
    assert isinstance(definition.node, ast.ClassDef)
    methods = frozenset(name for base in own_bases for name in _methods(base))
    described = Signature(
        kind=kind,
        name=module_name(name),
        path=path,
        line=definition.node.lineno,
        class_name=definition.name,
        doc=" ".join((ast.get_docstring(definition.node) or "").partition("\n\n")[0].split()),
        arguments=arguments,
        methods=methods,
        has_unread_bases=None in bases,
        constants=_merged(_constants(base) for base in reversed(own_bases)),
        fields=frozenset(itertools.chain.from_iterable(map(annotated_names, own_bases))),
    )
    described.refuse_other_names()
    return described


# -- the class -------------------------------------------------------------------------------------


def _without_utility(
    definition: Definition, arguments: tuple[Argument, ...]
) -> tuple[Argument, ...]:
    """The arguments of a dataset that a recipe sets. Raises ProjectError if it does not take its
    `util`."""
    others = tuple(argument for argument in arguments if argument.name != "util")
    if others == arguments:
        raise ProjectError(
            f"dataset {definition.name} does not take `util`, its DatasetUtility",
            where=f"{definition.module.path}:{definition.node.lineno}",
            hint="make `util: DatasetUtility` its first field",
        )
    return others


def _registered_class(kind: str, module: Module) -> Definition:
    """The class that the file registers under its own name, by a decorator or a call."""
    registrar = f"register_{kind.removesuffix('s')}"
    definitions: list[Definition] = []
    misnamed: list[str] = []
    for registered, target in _registrations(module, registrar):
        if module_name(registered) != module.path.stem:
            misnamed.append(registered)
            continue
        definition = class_named(module, target)
        if definition is not None:
            definitions.append(definition)
    classes = {(definition.module.name, definition.name): definition for definition in definitions}
    if len(classes) > 1:
        raise ProjectError(
            "the file registers several classes; it must register one", where=str(module.path)
        )
    if not classes:
        others = f"registers {', '.join(map(repr, misnamed))}, not {module.path.stem!r}"
        fault = others if misnamed else "registers no class"
        raise ProjectError(
            f"the file {fault}",
            where=str(module.path),
            hint=f"end it with {registrar}({module.path.stem!r}, TheClass), or rename the file",
        )
    return next(iter(classes.values()))


def _registrations(module: Module, registrar: str) -> Iterator[tuple[str, ast.expr]]:
    """Code that runs on import: decorators of classes, and calls outside classes and functions."""
    for statement in top_level(module.tree.body):
        if isinstance(statement, ast.ClassDef):
            for decorator in statement.decorator_list:
                if name := _registered_name(module, decorator, registrar):
                    yield name, ast.Name(statement.name)
        elif not isinstance(
            statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.Import | ast.ImportFrom
        ):
            yield from _registering_calls(module, statement, registrar)


def _registering_calls(
    module: Module, statement: ast.stmt, registrar: str
) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and (name := _registered_name(module, node, registrar)):
            target = _passed(node, 1, "cls")
            if target is not None:
                yield name, target


def _registered_name(module: Module, node: ast.expr, registrar: str) -> str | None:
    if not isinstance(node, ast.Call) or not (dotted(module, node.func) or "").endswith(registrar):
        return None
    value = _passed(node, 0, "name")
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _passed(call: ast.Call, position: int, keyword: str) -> ast.expr | None:
    """An argument of a call, by position or by keyword."""
    if len(call.args) > position:
        return call.args[position]
    return next((passed.value for passed in call.keywords if passed.arg == keyword), None)


def _check_parameters(definitions: Iterable[Definition]) -> None:
    """Each method of an interface takes `(model, data, mb_spec)`, under any names; the last may be
    omitted. Raises ProjectError."""
    seen: set[str] = set()
    for definition in definitions:
        assert isinstance(definition.node, ast.ClassDef)
        for node in definition.node.body:
            if not isinstance(node, ast.FunctionDef) or node.name in seen or node.name not in CALLS:
                continue
            seen.add(node.name)
            names = _misfit_parameters(node.args)
            if names is not None:
                message = f"{node.name} of {definition.name} takes ({', '.join(names)})"
                where = f"{definition.module.path}:{node.lineno}"
                hint = "it is called with (model, data, mb_spec)"
                raise ProjectError(message, where=where, hint=hint)


def _misfit_parameters(args: ast.arguments) -> list[str] | None:
    """The names of a method's parameters, if it cannot be called with `(model, data, mb_spec)`."""
    names = [parameter.arg for parameter in [*args.posonlyargs, *args.args][1:]]
    needed = len(names) - len(args.defaults)
    defaults = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    required = [parameter.arg for parameter, default in defaults if default is None]
    fits = not required and needed <= 3 and (len(names) >= 2 or args.vararg is not None)
    return None if fits else [*names, *required]


def _is_contract(definition: Definition) -> bool:
    return definition.module.name.startswith("rlcli.api.")


def _methods(definition: Definition) -> Iterator[str]:
    assert isinstance(definition.node, ast.ClassDef)
    for node in definition.node.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):  # `inference = some_function`
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _constants(definition: Definition) -> Iterator[tuple[str, Any]]:
    """The class's own literals: annotated with ClassVar, or not annotated at all."""
    assert isinstance(definition.node, ast.ClassDef)
    for statement in definition.node.body:
        match statement:
            case ast.AnnAssign(
                target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value
            ):
                head = annotation.value if isinstance(annotation, ast.Subscript) else annotation
                if dotted(definition.module, head) != "typing.ClassVar":
                    continue
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case _:
                continue
        try:
            yield name, ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue


def _merged(constants: Iterable[Iterable[tuple[str, Any]]]) -> dict[str, Any]:
    """Merge those of a class and its bases, the most distant first;
    a mapping adds to the inherited one."""
    merged: dict[str, Any] = {}
    for name, value in itertools.chain.from_iterable(constants):
        base = merged.get(name)
        base = base if isinstance(base, dict) else {}
        merged[name] = inherited([base, value]) if isinstance(value, dict) else value
    return merged
