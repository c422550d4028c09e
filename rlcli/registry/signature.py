"""What a component takes and does, read from its source without importing it.

So `rlcli validate`, `show` and `ls` check and explain the arguments of a component that needs torch, a GPU or
a library that is not installed.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.api.component import module_name
from rlcli.api.limits import BOUNDS, Limits
from rlcli.errors import ProjectError
from rlcli.registry.listing import path_of
from rlcli.registry.source import Definition, Module, dotted, find, read_module, top_level

if TYPE_CHECKING:
    from pydantic import BaseModel


class _Computed:
    def __repr__(self) -> str:
        return "computed"


COMPUTED = _Computed()
"""Stands for a default that is not a literal; `Argument.default_text` has its source."""

_FACTORIES = {"list": list, "dict": dict, "tuple": tuple, "set": set, "frozenset": frozenset}


@dataclass(frozen=True)
class Argument:
    """One field of a component's dataclass: one key under `args:`."""

    name: str
    annotation: str
    """The type, as written."""
    required: bool
    default: Any
    """The literal default, `COMPUTED`, or None where `required`."""
    default_text: str | None
    """The default's source, None where `required`."""
    doc: str
    """The string below the field."""
    path: Path
    line: int
    fields: tuple[Argument, ...] = ()
    """The arguments of the dataclass that this one is, if it is one."""
    type_node: ast.expr | None = field(default=None, repr=False, compare=False)
    module: Module | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Signature:
    """A component, as its source describes it."""

    kind: str
    name: str
    path: Path
    line: int
    class_name: str
    doc: str
    """First paragraph of the class's docstring, on one line."""
    arguments: tuple[Argument, ...]
    """What a recipe may write under `args:`; a dataset's `util` is not among them."""
    methods: frozenset[str]
    """Methods defined by the class and its bases, those of the contract in `rlcli.api` left out."""
    has_unread_bases: bool
    """Whether a base class lies outside rlcli, so that there may be more methods."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """What the class says of itself in literals that are no arguments: `KEYS: ClassVar[tuple[str, ...]] = (...)`."""

    def model(self, only: Collection[str] | None = None) -> type[BaseModel]:
        """A pydantic model of the arguments: unknown keys refused, no value converted to another type. `only`: of these
        and of the required ones, which is all that it takes to check them."""
        from rlcli.registry.arguments import arguments_model

        wanted = [a for a in self.arguments if only is None or a.required or a.name in only]
        return arguments_model(self.class_name, wanted, self.limits)

    @property
    def limits(self) -> Limits:
        """The bounds of its numbers, as its `LIMITS` declare them. Raises ProjectError for what is none."""
        limits = self.constants.get("LIMITS", {})
        for name, bounds in limits.items() if isinstance(limits, dict) else ():
            if not isinstance(bounds, dict) or not set(bounds) <= set(BOUNDS):
                what = f"LIMITS of {self.class_name} gives {name} {bounds!r}; bounds are {', '.join(BOUNDS)}"
                raise ProjectError(what, where=f"{self.path}:{self.line}", hint="for example {'ge': 1, 'le': 10}")
        return limits if isinstance(limits, dict) else {}


def signature(kind: str, name: str) -> Signature:
    """Read a component's signature."""
    path = path_of(kind, name)
    module = read_module(f"rlcli.{kind}.{path.stem}", path)
    definition = _registered_class(kind, module)
    lineage = list(_lineage(definition))
    arguments = arguments_of(definition)
    if kind == "datasets":
        if all(argument.name != "util" for argument in arguments):
            raise ProjectError(
                f"dataset {definition.name} does not take `util`, its DatasetUtility",
                where=f"{definition.module.path}:{definition.node.lineno}",
                hint="make `util: DatasetUtility` its first field",
            )
        arguments = tuple(argument for argument in arguments if argument.name != "util")
    assert isinstance(definition.node, ast.ClassDef)
    return Signature(
        kind=kind,
        name=path.stem,
        path=path,
        line=definition.node.lineno,
        class_name=definition.name,
        doc=" ".join((ast.get_docstring(definition.node) or "").partition("\n\n")[0].split()),
        arguments=arguments,
        methods=frozenset(name for part in lineage if part and not _is_contract(part) for name in _methods(part)),
        has_unread_bases=None in lineage,
        constants=_merged(_constants(part) for part in reversed(lineage) if part and not _is_contract(part)),
    )


# -- the class -------------------------------------------------------------------------------------------


def _registered_class(kind: str, module: Module) -> Definition:
    """The class that the file registers under its own name, as a decorator or by a call."""
    registrar = f"register_{kind.removesuffix('s')}"
    found: list[Definition] = []
    misnamed: list[str] = []
    for registered, target in _registrations(module, registrar):
        if module_name(registered) != module.path.stem:
            misnamed.append(registered)
            continue
        definition = _definition(module, target)
        if definition is not None:
            found.append(definition)
    classes = {(definition.module.name, definition.name): definition for definition in found}
    if len(classes) > 1:
        raise ProjectError("the file registers several classes; it must register one", where=str(module.path))
    if not classes:
        what = (
            f"registers {', '.join(map(repr, misnamed))}, not {module.path.stem!r}"
            if misnamed
            else "registers no class"
        )
        raise ProjectError(
            f"the file {what}",
            where=str(module.path),
            hint=f"end it with {registrar}({module.path.stem!r}, TheClass), or rename the file",
        )
    return next(iter(classes.values()))


def _registrations(module: Module, registrar: str) -> Iterator[tuple[str, ast.expr]]:
    """What runs when the file is imported: decorators of classes, and calls outside of them and of functions."""
    for statement in top_level(module.tree.body):
        if isinstance(statement, ast.ClassDef):
            for decorator in statement.decorator_list:
                if name := _registered_name(module, decorator, registrar):
                    yield name, ast.Name(statement.name)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.Import | ast.ImportFrom):
            yield from _registering_calls(module, statement, registrar)


def _registering_calls(module: Module, statement: ast.stmt, registrar: str) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and (name := _registered_name(module, node, registrar)):
            target = (
                node.args[1] if len(node.args) > 1 else next((k.value for k in node.keywords if k.arg == "cls"), None)
            )
            if target is not None:
                yield name, target


def _registered_name(module: Module, node: ast.expr, registrar: str) -> str | None:
    if not isinstance(node, ast.Call) or not (dotted(module, node.func) or "").endswith(registrar):
        return None
    value = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "name"), None)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _definition(module: Module, node: ast.expr) -> Definition | None:
    """The class that an expression names."""
    if isinstance(node, ast.Subscript):  # Generic[T]
        node = node.value
    full_name = dotted(module, node)
    if full_name is None:
        return None
    local = full_name.removeprefix(f"{module.name}.")
    if local in module.classes:  # also found when the file is not on the search path
        return Definition(module, local, module.classes[local])
    definition = find(full_name)
    return definition if definition is not None and isinstance(definition.node, ast.ClassDef) else None


def _bases(definition: Definition) -> list[Definition | None]:
    """The base classes in order; None for one that lies outside rlcli and may bring methods."""
    assert isinstance(definition.node, ast.ClassDef)
    plain = {"object", "abc.ABC", "typing.Generic", "typing.Protocol"}
    bases: list[Definition | None] = []
    for node in definition.node.bases:
        origin = dotted(definition.module, node.value if isinstance(node, ast.Subscript) else node)
        if origin not in plain:
            bases.append(_definition(definition.module, node))
    return bases


def _lineage(definition: Definition, depth: int = 0) -> Iterator[Definition | None]:
    yield definition
    for base in _bases(definition):
        if base is None or depth > 16:
            yield None
        else:
            yield from _lineage(base, depth + 1)


def _is_contract(definition: Definition) -> bool:
    return definition.module.name.startswith("rlcli.api.")


def _methods(definition: Definition) -> Iterator[str]:
    assert isinstance(definition.node, ast.ClassDef)
    for node in definition.node.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):  # `inference = some_function`
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


# -- its arguments ---------------------------------------------------------------------------------------


def arguments_of(definition: Definition, inside: tuple[str, ...] = ()) -> tuple[Argument, ...]:
    """What the class's `__init__` takes: its own, or the one that `@dataclass` writes, or its base's."""
    node = definition.node
    assert isinstance(node, ast.ClassDef)
    inside = (*inside, f"{definition.module.name}.{definition.name}")
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return tuple(_parameters(definition.module, statement, inside))
    bases = [base for base in _bases(definition) if base is not None and not _is_circle(base, inside)]
    if not is_dataclass(definition):
        return next((found for base in bases if (found := arguments_of(base, inside))), ())
    fields: dict[str, Argument] = {}
    for base in reversed(bases):
        if any(part and is_dataclass(part) for part in _lineage(base)):
            fields.update({argument.name: argument for argument in arguments_of(base, inside)})
    for name, argument in _own_fields(definition, inside):
        fields.pop(name, None) if argument is None else fields.update({name: argument})
    return tuple(fields.values())


def is_dataclass(definition: Definition) -> bool:
    """Whether the class has the standard decorator."""
    assert isinstance(definition.node, ast.ClassDef)
    decorators = (d.func if isinstance(d, ast.Call) else d for d in definition.node.decorator_list)
    return any(dotted(definition.module, d) == "dataclasses.dataclass" for d in decorators)


def _is_circle(definition: Definition, inside: tuple[str, ...]) -> bool:
    return f"{definition.module.name}.{definition.name}" in inside


def _own_fields(definition: Definition, inside: tuple[str, ...]) -> Iterator[tuple[str, Argument | None]]:
    """The class's own fields; None for one that its `__init__` does not take."""
    assert isinstance(definition.node, ast.ClassDef)
    module, body = definition.module, definition.node.body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, annotation = statement.target.id, statement.annotation
        head = annotation.value if isinstance(annotation, ast.Subscript) else annotation
        if dotted(module, head) in ("typing.ClassVar", "dataclasses.KW_ONLY"):
            continue
        default, takes = _field_default(module, statement.value)
        yield (
            name,
            _argument(module, name, annotation, default, _doc(following), statement.lineno, inside) if takes else None,
        )


def _constants(definition: Definition) -> Iterator[tuple[str, Any]]:
    """The class's own literals: annotated with ClassVar, or not annotated at all."""
    assert isinstance(definition.node, ast.ClassDef)
    for statement in definition.node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
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
    """Those of a class and its bases, the most distant first; a mapping adds to the one that it inherits."""
    merged: dict[str, Any] = {}
    for name, value in itertools.chain.from_iterable(constants):
        inherited = merged.get(name)
        merged[name] = inherited | value if isinstance(inherited, dict) and isinstance(value, dict) else value
    return merged


def _field_default(module: Module, value: ast.expr | None) -> tuple[ast.expr | None, bool]:
    """The default's expression, and whether `__init__` takes the field; sees through `field(...)`."""
    if not isinstance(value, ast.Call) or dotted(module, value.func) != "dataclasses.field":
        return value, True
    options = {keyword.arg: keyword.value for keyword in value.keywords}
    init = options.get("init")
    takes = not (isinstance(init, ast.Constant) and init.value is False)
    factory = options.get("default_factory")
    return (ast.Call(factory, [], []) if factory is not None else options.get("default")), takes


def _parameters(module: Module, function: ast.FunctionDef, inside: tuple[str, ...]) -> Iterator[Argument]:
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    pairs = list(zip(positional, [*defaults, *given.defaults], strict=True))[1:]
    for parameter, default in [*pairs, *zip(given.kwonlyargs, given.kw_defaults, strict=True)]:
        annotation = parameter.annotation or ast.Name("Any")
        yield _argument(module, parameter.arg, annotation, default, "", parameter.lineno, inside)


def _argument(
    module: Module,
    name: str,
    annotation: ast.expr,
    default: ast.expr | None,
    doc: str,
    line: int,
    inside: tuple[str, ...],
) -> Argument:
    nested = nested_dataclass(module, annotation)
    return Argument(
        name=name,
        annotation=ast.unparse(annotation),
        required=default is None,
        default=None if default is None else _literal(default),
        default_text=None if default is None else ast.unparse(default),
        doc=doc,
        path=module.path,
        line=line,
        fields=arguments_of(nested, inside) if nested is not None and not _is_circle(nested, inside) else (),
        type_node=annotation,
        module=module,
    )


def nested_dataclass(module: Module, annotation: ast.expr) -> Definition | None:
    """The dataclass that a field is: `PPOArgs`, or `PPOArgs | None`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.BinOp):
        sides = [nested_dataclass(module, side) for side in (annotation.left, annotation.right)]
        return next((side for side in sides if side is not None), None)
    definition = _definition(module, annotation)
    return definition if definition is not None and is_dataclass(definition) else None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args and not node.keywords:
        return _FACTORIES[node.func.id]() if node.func.id in _FACTORIES else COMPUTED
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return COMPUTED


def _doc(statement: ast.stmt | None) -> str:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return inspect.cleandoc(text)
    return ""
