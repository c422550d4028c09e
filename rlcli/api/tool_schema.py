"""JSON schemas of tools, from the type hints and docstrings of methods, and arguments checked
against them.

The schemas are those of `transformers.utils.get_json_schema`, which chat templates expect, with the
defaults of arguments in addition, and docstrings may leave arguments out.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Schema = dict[str, Any]

LONGEST_SHOWN = 60
"""Characters of a wrong value in a problem."""
MOST_PROBLEMS = 8

MOST_TOOLS = 128
LONGEST_SCHEMAS = 1 << 16
"""Characters of the schemas of all tools, as JSON."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

_NAMES: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array",
    dict: "object", type(None): "null",
}  # fmt: skip
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\s*)(\w+)\s*(?:\([^()\n]*\))?:[ \t]*(.*)$")


def tool_schema(method: Callable[..., Any]) -> Schema:
    """The JSON schema of a tool: its name, its description, and its parameters, of the types str,
    int, float, bool, list, dict, Literal, Any, None and unions of them.

    Raises ValueError for a parameter without a type hint, or with one that JSON cannot express, and
    for `*args` and `**kwargs`.
    """
    summary, described = _docstring(method)
    hints = _type_hints(method)
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for parameter in _parameters(method):
        if parameter.name not in hints:
            raise ValueError(f"{method.__name__}: the parameter {parameter.name} has no type hint")
        schema = _schema_of(parameter, hints[parameter.name], method.__name__)
        if parameter.name in described:
            schema["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        properties[parameter.name] = schema
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    function = {"name": method.__name__, "description": summary, "parameters": parameters}
    return {"type": "function", "function": function}


def checked_schemas(stated: Iterable[Schema]) -> dict[str, Schema]:
    """The JSON schemas of tools that were stated, by a server for example, by their names. Raises
    ValueError if they are not like those of `tool_schema`, or too many or too long."""
    schemas: dict[str, Schema] = {}
    for schema in stated:
        match schema:
            case {"type": "function", "function": {"name": str(name), "description": str()}}:
                parameters = schema["function"].get("parameters")
            case _:
                raise ValueError(f"{_shown(schema)} is not the schema of a tool")
        if not TOOL_NAME.fullmatch(name):
            raise ValueError(f"a tool has the name {_shown(name)}; use letters, digits, _, . and -")
        if name in schemas:
            raise ValueError(f"two tools have the name {name}")
        match parameters:
            case {"type": "object", "properties": Mapping()}:
                schemas[name] = schema
            case _:
                raise ValueError(f"the parameters of {name} are not those of a JSON object")
    if len(schemas) > MOST_TOOLS:
        raise ValueError(f"there are {len(schemas)} tools; at most {MOST_TOOLS} are possible")
    length = len(json.dumps(list(schemas.values()), allow_nan=False))
    if length > LONGEST_SCHEMAS:
        limit = f"{LONGEST_SCHEMAS} are possible"
        raise ValueError(f"the schemas of the tools have {length} characters; {limit}")
    return schemas


def schema_of_hint(hint: Any) -> Schema:
    """The JSON schema of a type. Raises ValueError for one that JSON cannot express."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    if origin is Literal:
        return _choices(list(arguments))
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is list:
        return {"type": "array", "items": schema_of_hint(arguments[0])}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": schema_of_hint(arguments[1])}
    raise ValueError(
        f"has the type {hint}, which JSON cannot express; use str, int, float, bool, list, dict, "
        "Literal, or a union of them"
    )


def check_arguments(schema: Schema | Callable[..., Any], arguments: Any) -> list[str]:
    """What is wrong with the arguments of a call, a line each, for the model that wrote it to read.

    `schema`: that of the tool, or the tool itself. Empty where the arguments fit. A value is never
    converted: 1 is a number, and neither "1" nor true nor 1.0 is an integer.
    """
    tool = tool_schema(schema) if callable(schema) else schema
    expected = tool.get("function", tool).get("parameters") or {}
    if not isinstance(arguments, Mapping):
        return [f"the arguments are {_shown(arguments)}; they must be a JSON object"]
    properties = expected.get("properties", {})
    problems = [
        f"{name} is missing" for name in expected.get("required", ()) if name not in arguments
    ]
    for name, value in arguments.items():
        if name in properties:
            problems += _problems(properties[name], value, str(name))
        elif not expected.get("additionalProperties"):
            listed = ", ".join(properties) or "none"
            problems.append(f"{_shown(name)} is not an argument; the arguments are: {listed}")
    return problems[:MOST_PROBLEMS]


def allows(schema: Any, value: Any) -> bool:
    """Whether a value fits the schema of an argument, as `check_arguments` decides it. Where there
    is no schema, anything does."""
    return not _problems(schema, value, "")


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those of a method without its `self`."""
    parameters = list(inspect.signature(method).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{method.__name__}: a tool cannot have the parameter {parameter}")
    return parameters


def _type_hints(method: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(method)
    except NameError as error:
        raise ValueError(
            f"{method.__name__} has a type hint that is not defined: {error}"
        ) from None


def _schema_of(parameter: inspect.Parameter, hint: Any, tool: str) -> Schema:
    try:
        schema = schema_of_hint(hint)
    except ValueError as error:
        raise ValueError(f"{tool}: {parameter.name} {error}") from None
    if parameter.default not in (parameter.empty, None):
        schema["default"] = parameter.default
    return schema


def _choices(values: list[Any]) -> Schema:
    names = list(dict.fromkeys(_NAMES.get(type(value)) for value in values))
    if None in names:
        raise ValueError(f"has choices that JSON cannot express: {values}")
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _union(hints: Sequence[Any]) -> Schema:
    schemas = [schema_of_hint(hint) for hint in hints if hint is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(schema.keys() == {"type"} for schema in schemas):
        schema = {"type": sorted({schema["type"] for schema in schemas})}
    else:
        schema = {"anyOf": schemas}
    if type(None) in hints:
        schema["nullable"] = True
    return schema


def _docstring(method: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text before the first section, and what `Args:` says about each parameter."""
    text = inspect.getdoc(method) or ""
    pieces = _SECTION.split(text)
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    described: dict[str, list[str]] = {}
    name = outermost = None
    for line in (sections.get("Args") or sections.get("Arguments") or "").splitlines():
        entry = _ARGUMENT.match(line)
        if entry is not None and outermost in (None, entry[1]):
            outermost, name = entry[1], entry[2]
            described[name] = [entry[3].strip()]
        elif name is not None:
            described[name].append(line.strip())
    return pieces[0].strip(), {name: " ".join(lines).strip() for name, lines in described.items()}


def _problems(schema: Any, value: Any, subject: str) -> list[str]:
    """What is wrong with a value. Keywords of schemas that are not known here allow anything."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return []
    alternatives = schema.get("anyOf")
    if alternatives is not None:
        fits = any(not _problems(each, value, subject) for each in alternatives)
        return [] if fits else [_wrong(subject, value, _expected(schema))]
    if not _has_type(schema, value):
        return [_wrong(subject, value, _expected(schema))]
    choices = schema.get("enum")
    if choices is not None and not any(_equal(value, choice) for choice in choices):
        return [_wrong(subject, value, f"one of {', '.join(map(_shown, choices))}")]
    return _problems_inside(schema, value, subject)


def _problems_inside(schema: Mapping[str, Any], value: Any, subject: str) -> list[str]:
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            if problems := _problems(schema["items"], item, f"{subject}[{number}]"):
                return problems
    if isinstance(value, Mapping):
        fields = schema.get("properties", {})
        others = schema.get("additionalProperties")
        for name, item in value.items():
            if problems := _problems(fields.get(name, others), item, f"{subject}.{_key(name)}"):
                return problems
        missing = [name for name in schema.get("required", ()) if name not in value]
        return [f"{subject}.{name} is missing" for name in missing]
    return []


def _has_type(schema: Mapping[str, Any], value: Any) -> bool:
    names = schema.get("type")
    if names is None:
        return True
    allowed = [names] if isinstance(names, str) else names
    name = _NAMES.get(type(value))
    if name == "number" and not math.isfinite(value):
        return False
    return name in allowed or (name == "integer" and "number" in allowed)


def _expected(schema: Mapping[str, Any]) -> str:
    """The types that a schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(_expected(each) for each in schema["anyOf"])
    names = schema.get("type")
    return " or ".join([names] if isinstance(names, str) else names or ["anything"])


def _wrong(subject: str, value: Any, expected: str) -> str:
    return f"{subject} is {_shown(value)}; it must be {expected}"


def _equal(value: Any, choice: Any) -> bool:
    return type(value) is type(choice) and bool(value == choice)


def _key(name: Any) -> str:
    return name if isinstance(name, str) and name.isidentifier() else _shown(name)


def _shown(value: Any) -> str:
    """A value as JSON, on one line and of limited length."""
    if isinstance(value, list | dict) and len(value) > LONGEST_SHOWN:
        return f"a JSON {_NAMES[type(value)]} of {len(value)} items"
    if isinstance(value, str):
        value = value[:LONGEST_SHOWN]
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
