"""The fields of classes, read from their source: those of a dataclass, of its bases, and of what they hold."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlcli.registry.source import Definition, Module, dotted, find


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
    """The arguments of the dataclass that this one is, if it is one, with the defaults that they have here."""
    presets: Mapping[str, Any] | None = None
    """Of a dataclass that is made where it is not given: what is set then, and stays so for what a recipe leaves out.
    None where it is not made, or only its source knows how."""
    type_node: ast.expr | None = field(default=None, repr=False, compare=False)
    module: Module | None = field(default=None, repr=False, compare=False)


# -- classes ---------------------------------------------------------------------------------------------


def class_named(module: Module, node: ast.expr) -> Definition | None:
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
            bases.append(class_named(definition.module, node))
    return bases


def lineage(definition: Definition, depth: int = 0) -> Iterator[Definition | None]:
    yield definition
    for base in _bases(definition):
        if base is None or depth > 16:
            yield None
        else:
            yield from lineage(base, depth + 1)


# -- their fields ----------------------------------------------------------------------------------------


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
        if any(part and is_dataclass(part) for part in lineage(base)):
            fields.update({argument.name: argument for argument in arguments_of(base, inside)})
    for name, argument in _own_fields(definition, inside):
        fields.pop(name, None) if argument is None else fields.update({name: argument})
    return tuple(fields.values())


def is_dataclass(definition: Definition) -> bool:
    """Whether the class has the standard decorator, or the one that transformers' configurations have."""
    assert isinstance(definition.node, ast.ClassDef)
    decorators = (d.func if isinstance(d, ast.Call) else d for d in definition.node.decorator_list)
    makers = ("dataclasses.dataclass", "huggingface_hub.dataclasses.strict")
    return any(dotted(definition.module, d) in makers for d in decorators)


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


def _field_default(module: Module, value: ast.expr | None) -> tuple[ast.expr | None, bool]:
    """The default's expression, and whether `__init__` takes the field; sees through `field(...)`."""
    if not isinstance(value, ast.Call) or dotted(module, value.func) != "dataclasses.field":
        return value, True
    options = {keyword.arg: keyword.value for keyword in value.keywords}
    init = options.get("init")
    takes = not (isinstance(init, ast.Constant) and init.value is False)
    factory = options.get("default_factory")
    if isinstance(factory, ast.Lambda):
        return factory.body, takes
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
    presets = _presets(module, default, nested) if nested is not None else None
    fields = arguments_of(nested, inside) if nested is not None and not _is_circle(nested, inside) else ()
    return Argument(
        name=name,
        annotation=ast.unparse(annotation),
        required=default is None,
        default=None if default is None else _literal(default),
        default_text=None if default is None else ast.unparse(default),
        doc=doc,
        path=module.path,
        line=line,
        fields=tuple(_preset(one, presets or {}) for one in fields),
        presets=presets,
        type_node=annotation,
        module=module,
    )


def _presets(module: Module, default: ast.expr | None, nested: Definition) -> dict[str, Any] | None:
    """The literals of `Sampling(temperature=0.7)`, if the default is such a call of the class itself."""
    if not isinstance(default, ast.Call) or default.args:
        return None
    made = class_named(module, default.func)
    values = {keyword.arg: _literal(keyword.value) for keyword in default.keywords}
    if made is None or (made.module.name, made.name) != (nested.module.name, nested.name):
        return None
    return {str(name): value for name, value in values.items()} if COMPUTED not in values.values() else None


def _preset(argument: Argument, presets: Mapping[str, Any]) -> Argument:
    if argument.name not in presets:
        return argument
    value = presets[argument.name]
    return replace(argument, required=False, default=value, default_text=repr(value))


def nested_dataclass(module: Module, annotation: ast.expr) -> Definition | None:
    """The dataclass that a field is: `PPOArgs`, or `PPOArgs | None`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.BinOp):
        sides = [nested_dataclass(module, side) for side in (annotation.left, annotation.right)]
        return next((side for side in sides if side is not None), None)
    definition = class_named(module, annotation)
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
