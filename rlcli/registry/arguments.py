"""Checks a recipe's `args:` against a component's signature,
and builds the objects they describe."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictBytes,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rlcli.api.limits import Limits
from rlcli.errors import ProjectError, UsageError
from rlcli.registry.class_fields import COMPUTED, Argument, arguments_of, nested_dataclass
from rlcli.registry.signature import signature
from rlcli.registry.source import Definition, Module, dotted, find, imported_name

_PLAIN: dict[str, Any] = {
    "int": StrictInt,
    "float": StrictFloat,
    "str": StrictStr,
    "bool": StrictBool,
    "bytes": StrictBytes,
    "object": Any,
    "Any": Any,
    "typing.Any": Any,
    "pathlib.Path": Path,
    "os.PathLike": Path,
}
_CONTAINERS: dict[str, Any] = {
    **dict.fromkeys(("list", "typing.List"), list),
    **dict.fromkeys(("tuple", "typing.Tuple"), tuple),
    **dict.fromkeys(("dict", "typing.Dict"), dict),
    **dict.fromkeys(("set", "typing.Set"), set),
    **dict.fromkeys(("frozenset", "typing.FrozenSet"), frozenset),
}
for _module in ("collections.abc", "typing"):
    _CONTAINERS.update(
        dict.fromkeys((f"{_module}.{name}" for name in ("Mapping", "MutableMapping")), dict)
    )
    _sequences = ("Sequence", "MutableSequence", "Iterable", "Collection")
    _CONTAINERS.update(dict.fromkeys((f"{_module}.{name}" for name in _sequences), list))
_WRAPPERS = ("typing.Annotated", "typing.Final", "dataclasses.InitVar", "typing.Required")


class ArgumentsModel(BaseModel):
    """Base of the models made from signatures; knows which dataclass each one represents."""

    model_config = ConfigDict(extra="forbid")

    home: ClassVar[tuple[str, str] | None] = None
    """Module and name of a nested dataclass; None for the component itself."""

    @model_validator(mode="after")
    def check_by_the_dataclass(self) -> Self:
        """Settings that do not need torch run their own checks already in `rlcli validate`."""
        if self.home is not None and self.home[0] == "rlcli.api.config":
            try:
                construct(self)
            except UsageError as error:
                raise ValueError(error.what.removeprefix("args: ")) from error
        return self


def arguments_model(
    name: str, arguments: Sequence[Argument], limits: Limits | None = None
) -> type[BaseModel]:
    """The pydantic model of a component's arguments, with numbers bounded by `limits`
    (`rlcli.api.limits`)."""
    return _model(name, arguments, ArgumentsModel, limits)


def validated(kind: str, name: str, args: Mapping[str, Any]) -> BaseModel:
    """The arguments of a component, checked and coerced; all mistakes are reported at once."""
    try:
        return signature(kind, name).model(only=args).model_validate(dict(args))
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
            for detail in error.errors(include_url=False)
        ]
        if any(detail["type"] == "extra_forbidden" for detail in error.errors(include_url=False)):
            lines.append(
                "it takes "
                f"{', '.join(argument.name for argument in signature(kind, name).arguments)}"
            )
        raise UsageError(
            f"{kind.removesuffix('s')} {name}: {'; '.join(lines)}", code="R42"
        ) from error


def construct(value: Any, owner: str = "args") -> Any:
    """Replace each nested model by its real dataclass;
    the outermost becomes a dict of keyword arguments.

    Only values given in the recipe are passed on, so that defaults remain those of the classes.
    """
    if isinstance(value, ArgumentsModel):
        values = {
            info.alias or key: construct(getattr(value, key), owner)
            for key, info in type(value).model_fields.items()
            if key in value.model_fields_set
        }
        return values if value.home is None else _instance(value.home, values, owner)
    if isinstance(value, dict):
        return {key: construct(item, owner) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(construct(item, owner) for item in value)
    return value


def _instance(home: tuple[str, str], values: dict[str, Any], owner: str) -> Any:
    cls = getattr(importlib.import_module(home[0]), home[1])
    try:
        return cls(**values)
    except ValueError as error:
        raise UsageError(f"{owner}: {error}") from error


def _model(
    name: str,
    arguments: Sequence[Argument],
    base: type[ArgumentsModel],
    limits: Limits | None = None,
) -> type[ArgumentsModel]:
    fields: dict[str, Any] = {}
    for argument in arguments:
        default: Any = (
            ... if argument.required else None if argument.default is COMPUTED else argument.default
        )
        computed: dict[str, Any] | None = (
            {"default": argument.default_text} if argument.default is COMPUTED else None
        )
        kind = type_of_argument(argument)
        bounds: Any = (limits or {}).get(argument.name, {})
        if bounds and not {*members_of(kind)} <= {StrictInt, StrictFloat, NoneType}:
            kind, bounds = _bounded(argument, kind, bounds), {}
        info = Field(
            default,
            alias=argument.name,
            description=argument.doc or None,
            json_schema_extra=computed,
            **bounds,
        )
        # An alias, because a field may have the name of a pydantic method (copy, json, schema).
        fields[f"arg_{argument.name}"] = (kind, info)
    return create_model(name, __base__=base, **fields)


def _bounded(argument: Argument, kind: Any, bounds: Any) -> Any:
    """A type that has others than numbers, such as `float | Literal["auto"]`, with bounds for the
    numbers. Raises ProjectError for a list, or another container."""
    for member in members_of(kind):
        if (get_origin(member) or member) in _CONTAINERS.values():
            raise ProjectError(
                f"LIMITS bounds {argument.name}, whose type is {argument.annotation}: it is for "
                "numbers",
                where=f"{argument.path}:{argument.line}",
                hint="raise ValueError in __post_init__ for what must not be in it",
            )
    numbers = (StrictInt, StrictFloat, Any)
    return _union(
        [
            Annotated[member, Field(**bounds)] if member in numbers else member
            for member in members_of(kind)
        ]
    )


def members_of(kind: Any) -> tuple[Any, ...]:
    """The members of a union; or the only one."""
    return get_args(kind) if get_origin(kind) is Union else (kind,)


def type_of_argument(argument: Argument) -> Any:
    """The type used to check its values. Raises ProjectError for an unreadable annotation."""
    assert argument.type_node is not None
    assert argument.module is not None
    try:
        kind = _type(argument.module, argument.type_node, argument.fields)
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        message = f"the type of {argument.name} cannot be read: {argument.annotation}"
        raise ProjectError(message, where=f"{argument.path}:{argument.line}") from error
    presets = argument.presets
    if not presets:
        return kind
    return Annotated[
        kind,
        BeforeValidator(lambda value: {**presets, **value} if isinstance(value, dict) else value),
    ]


def _type(module: Module, node: ast.expr, fields: Sequence[Argument] = ()) -> Any:
    """The type that pydantic checks an annotation with. `fields`: those of the dataclass it names,
    with the defaults they have here."""
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str(text)):
            return _type(module, ast.parse(text, mode="eval").body, fields)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _union([_type(module, left, fields), _type(module, right, fields)])
        case ast.Subscript(value=head, slice=inner):
            items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return _generic(module, node, dotted(module, head) or "", items)
    name = dotted(module, node) or ""
    plain_type = _PLAIN.get(name) or _CONTAINERS.get(name)
    if plain_type is not None:
        return plain_type
    nested = nested_dataclass(module, node)
    if nested is not None:
        return _nested(nested, fields)
    alias = find(name) or _local_alias(module, node)
    if alias is not None and not isinstance(alias.node, ast.ClassDef):
        return _type(alias.module, alias.node)
    return _unwritable(ast.unparse(node))


def _generic(module: Module, node: ast.expr, head: str, items: list[ast.expr]) -> Any:
    if head in ("typing.Literal", "typing_extensions.Literal"):
        return Literal[tuple(ast.literal_eval(item) for item in items)]
    if head in _WRAPPERS:
        return _type(module, items[0])
    if head == "typing.Optional":
        return _union([_type(module, items[0]), None])
    if head == "typing.Union":
        return _union([_type(module, item) for item in items])
    container = _CONTAINERS.get(head)
    if container is None:
        return _unwritable(ast.unparse(node))
    inner = [
        ... if isinstance(item, ast.Constant) and item.value is ... else _type(module, item)
        for item in items
    ]
    return container[tuple(inner)]


def _union(types: list[Any]) -> Any:
    # not all are classes, so `|` will not do
    return functools.reduce(lambda union, member: Union[union, member], types)  # noqa: UP007


def _nested(definition: Definition, fields: Sequence[Argument]) -> type[ArgumentsModel]:
    """The model of a nested dataclass."""

    class Nested(ArgumentsModel):
        home: ClassVar[tuple[str, str] | None] = (
            imported_name(definition.module),
            definition.name,
        )

    return _model(definition.name, fields or arguments_of(definition), Nested)


def _local_alias(module: Module, node: ast.expr) -> Definition | None:
    if isinstance(node, ast.Name) and node.id in module.aliases:
        return Definition(module, node.id, module.aliases[node.id])
    return None


def _unwritable(annotation: str) -> Any:
    """A type that YAML cannot express: the field keeps its default,
    and a recipe that sets it gets an error."""

    def refuse(value: Any) -> Any:
        raise PydanticCustomError(
            "unwritable",
            "a value of type {type} cannot be written in a recipe",
            {"type": annotation},
        )

    validator: Callable[[Any], Any] = refuse
    return Annotated[Any, BeforeValidator(validator)]
