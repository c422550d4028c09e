"""JSON Schema (draft 2020-12) of a recipe file, for editors: allowed values,
and documentation for every key.

It describes a single layer as written, not the whole recipe: nothing is required, because another
layer may provide it; `${a.b}` may stand for any value, null removes what the layers below say, and
`_replace_` and `_append_` control how a layer is merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcli import registry
from rlcli.api.component import module_name
from rlcli.errors import RlcliError, UsageError
from rlcli.recipe import schema as sections
from rlcli.recipe.introspection.docs import doc_of
from rlcli.recipe.parsing.finding import recipe_names
from rlcli.recipe.parsing.interpolation import Reference, references_in
from rlcli.recipe.parsing.merge import APPEND, REPLACE, spell_out_types
from rlcli.recipe.parsing.places import kind_at
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.reader import parse, read_file
from rlcli.recipe.parsing.tree import Node, Scalar, at
from rlcli.recipe.schema import SECTIONS, Component, Recipe
from rlcli.recipe.sections import launch
from rlcli.recipe.sections.launch import LaunchSection
from rlcli.spelling import did_you_mean

Schema = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
MADE_BY = "made by rlcli schema; it describes the components found here when it was made"

REFERENCE: Schema = {"$ref": "#/$defs/reference"}
REMOVED: Schema = {"$ref": "#/$defs/removed"}
_DEFINITIONS: dict[str, Schema] = {
    "reference": {
        "type": "string",
        "pattern": r"^\s*\$\{[^{}]+\}\s*$",
        "description": (
            "A value from elsewhere in the recipe, ${a.b}, or from the environment, ${env:NAME}."
        ),
    },
    "removed": {
        "type": "null",
        "description": "Ignores what the layers below set here: an entry is removed, an "
        "optional key has its default.",
    },
    "replace": {
        "const": True,
        "description": "Replace the section of the layers below instead of merging with it.",
    },
}
_EXTENDS: Schema = {
    "description": "Layers below this file, lowest first: files next to it, or recipes by name.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}
_BLOCK = "A block of values of the recipe's own, shared by ${…}."


def schema_of(name: str | None = None) -> Schema:
    """The schema of a recipe, of one of its sections (`train.eval`), or of a component's arguments.

    Raises UsageError R42 if there is no such section or component.
    """
    schema = recipe_schema()
    if name is None:
        return schema
    content = _component_arguments(name, schema) or _section(name, schema)
    if content is None:
        names = [*SECTIONS, *(name for kind in registry.KINDS for name in registry.names(kind))]
        hint = did_you_mean(name.rpartition(".")[2], names, f"sections: {', '.join(SECTIONS)}")
        raise UsageError(f"no section and no component is named {name}", hint=hint, code="R42")
    definitions = {name: schema["$defs"][name] for name in _reachable(content, schema["$defs"])}
    return {
        "$schema": DRAFT,
        "title": name,
        **content,
        **({"$defs": definitions} if definitions else {}),
    }


def recipe_schema() -> Schema:
    """The whole schema, including the user's own components and blocks."""
    model = _documented(Recipe.model_json_schema())
    definitions = dict(_DEFINITIONS)
    for kind in registry.KINDS:
        definitions |= _component_definitions(kind)
    for name, definition in model["$defs"].items():
        if name != Component.__name__:
            definitions[name] = _object(definition)
    _use_kinds(definitions, model)
    required = model["required"]
    properties = {
        name: _value(field, "", name not in required) for name, field in model["properties"].items()
    }
    properties["launch"]["anyOf"].insert(
        0, {"enum": model["$defs"][LaunchSection.__name__]["properties"]["type"]["enum"]}
    )
    return {
        "$schema": DRAFT,
        "$comment": MADE_BY,
        "title": "rlcli recipe",
        "type": "object",
        "properties": {"extends": _EXTENDS, **properties, **_blocks(definitions)},
        "additionalProperties": {"type": ["object", "null"], "description": _BLOCK},
        "$defs": definitions,
    }


def _documented(model: Schema) -> Schema:
    """Pydantic's schema of a recipe, with the docstring of each field."""
    classes = vars(launch) | vars(sections)
    for name, definition in {Recipe.__name__: model, **model["$defs"]}.items():
        for field, node in definition["properties"].items():
            node["description"] = doc_of(classes[name], field)
    return model


def _use_kinds(definitions: dict[str, Schema], model: Schema) -> None:
    """Set the kind of component at each place that takes one.
    Edits what `model` and `definitions` share."""
    for section in ("Role", "Rollout"):
        definitions[section]["properties"]["backend"] |= {"anyOf": [_ref("backends"), REFERENCE]}
    definitions["Call"]["properties"]["interface"] |= {"anyOf": [_ref("interfaces"), REFERENCE]}
    (pattern,) = model["properties"]["datasets"]["patternProperties"]
    model["properties"]["datasets"]["patternProperties"] = {pattern: _ref("datasets")}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


# -- as a layer writes it --------------------------------------------------------------------------


def _value(node: Schema, prefix: str = "", optional: bool = True) -> Schema:
    """Allowed content of a field: its value, a reference to one, or null for an optional one.
    `prefix` is put before names of definitions."""
    described: Schema = {key: node[key] for key in ("default", "examples") if key in node}
    if "description" in node:
        described = {"description": " ".join(node["description"].split()), **described}
    written = list(_forms(node, prefix))
    others = [REFERENCE, *([REMOVED] if optional and {"type": "null"} not in written else [])]
    return {**described, "anyOf": [*written, *others]} if written != [{}] else described


def _forms(node: Schema, prefix: str) -> Iterator[Schema]:
    """The ways to write a value of one type."""
    core = {
        key: value
        for key, value in node.items()
        if key not in ("title", "description", "default", "examples")
    }
    if "anyOf" in core:
        for form in core["anyOf"]:
            yield from _forms(form, prefix)
    elif "$ref" in core:
        yield _ref(prefix + core["$ref"].rpartition("/")[2])
    elif core.get("type") == "object":
        yield _object(core, prefix)
    elif core.get("type") == "array":
        array = _array(core, prefix)
        yield array
        yield {
            "type": "object",
            "properties": {APPEND: array},
            "required": [APPEND],
            "additionalProperties": False,
        }
    elif core.get("type") == "string" and "enum" not in core and "const" not in core:
        yield {key: value for key, value in core.items() if key != "format"}
        yield {"type": ["number", "boolean"]}  # 1.10 and true are text where text is expected
    else:
        yield core


def _array(node: Schema, prefix: str) -> Schema:
    """A list, each entry of which may be a reference."""
    array = dict(node)
    if "items" in node:
        array["items"] = _value(node["items"], prefix, optional=False)
    if "prefixItems" in node:
        array["prefixItems"] = [_value(entry, prefix, False) for entry in node["prefixItems"]]
    return array


def _object(node: Schema, prefix: str = "") -> Schema:
    """A section as a layer may write it: complete, partial, or with `_replace_`."""
    result: Schema = {"type": "object"}
    if "description" in node:
        result["description"] = " ".join(node["description"].split())
    fields, required = node.get("properties", {}), node.get("required", ())
    result["properties"] = {
        name: _value(field, prefix, name not in required) for name, field in fields.items()
    }
    result["properties"][REPLACE] = _ref("replace")
    if "patternProperties" in node:
        patterns = node["patternProperties"].items()
        result["patternProperties"] = {
            pattern: _value(inner, prefix) for pattern, inner in patterns
        }
    others = node.get("additionalProperties", "patternProperties" not in node)
    result["additionalProperties"] = _value(others, prefix) if isinstance(others, dict) else others
    return result


# -- components ------------------------------------------------------------------------------------


def _component_definitions(kind: str) -> dict[str, Schema]:
    """The definitions of a kind, of each of its components' arguments,
    and of the sections within them."""
    definitions: dict[str, Schema] = {}
    docs: dict[str, str] = {}
    for name in registry.names(kind):
        key = f"{kind}.{name}"
        try:
            signature = registry.signature(kind, name)
            model = signature.model().model_json_schema()
        except RlcliError as error:  # `rlcli ls` reports it; the rest is still useful
            definitions[key], docs[name] = {"type": "object", "description": error.what}, error.what
            continue
        docs[name] = signature.doc
        definitions[key] = {**_object(model, f"{key}."), "description": signature.doc}
        definitions |= {
            f"{key}.{inner}": _object(node, f"{key}.")
            for inner, node in model.get("$defs", {}).items()
        }
    return {kind: _component(kind, docs), **definitions}


def _component(kind: str, docs: Mapping[str, str]) -> Schema:
    """A component by name, or as a section whose `args` depend on its `type`."""
    names = [*_names_of(docs), MODULE]
    arguments = {name: {"anyOf": [_ref(f"{kind}.{name}"), REFERENCE, REMOVED]} for name in docs}
    branches = [_arguments_if(name, arguments[name], doc) for name, doc in docs.items()]
    of_any = {"properties": {"args": {"anyOf": [*arguments.values()]}}}
    section = {
        "type": "object",
        "properties": {
            "type": {"description": doc_of(Component, "type"), "anyOf": [*names, REFERENCE]},
            "args": {
                "description": doc_of(Component, "args"),
                "type": ["object", "string", "null"],
            },
            REPLACE: _ref("replace"),
        },
        "additionalProperties": False,
        "allOf": branches,
        # A layer that leaves the type to another one may set any argument of any component of this
        # kind.
        **({"if": {"required": ["type"]}, "else": of_any} if arguments else {}),
    }
    return {"anyOf": [*names, section]}


def _arguments_if(name: str, arguments: Schema, doc: str) -> Schema:
    """What `args` of a component are if its `type` is the name."""
    return {
        "if": {"properties": {"type": _spelt(name)}, "required": ["type"]},
        "then": {"properties": {"args": {**arguments, "description": doc}}},
    }


MODULE: Schema = {
    "type": "string",
    "pattern": r"^\w+(\.\w+)+$",
    "description": "A module of an installed package.",
}


def _names_of(docs: Mapping[str, str]) -> Iterator[Schema]:
    """The ways to write the names of components."""
    yield from ({"const": name, "description": doc} for name, doc in docs.items())
    yield from (_spelt(name) for name in docs if "_" in name)
    if "null" in docs:
        yield {"type": "null"}


def _spelt(name: str) -> Schema:
    """`my_dataset` may also be written `my-dataset`."""
    return {"type": "string", "pattern": f"^{name.replace('_', '[-_]')}$"}


def _blocks(definitions: Mapping[str, Schema]) -> dict[str, Schema]:
    """The available recipes' blocks and shared values; typed if every user of a block is a
    component's arguments."""
    takers: dict[str, dict[str | None, None]] = {}
    for tree in _trees():
        for reference in references_in(tree):
            if reference.target[0] not in SECTIONS and not str(reference.target[0]).startswith(
                "env:"
            ):
                taker = _taker(reference, tree)
                takers.setdefault(str(reference.target[0]), {})[
                    taker if taker in definitions else None
                ] = None
    blocks: dict[str, Schema] = {}
    for block, keys in takers.items():
        typed = [key for key in keys if key is not None]
        blocks[block] = {
            "description": (
                f"A block of the recipes, shared by ${{{block}}}: {', '.join(typed) or 'a value'}."
            )
        }
        if len(typed) == len(keys):
            blocks[block] |= _arguments_of_any([definitions[key] for key in typed])
    return blocks


def _arguments_of_any(takers: Sequence[Schema]) -> Schema:
    """Arguments in a block: each component uses the keys that it has."""
    keys = {
        name: schema for taker in takers for name, schema in taker.get("properties", {}).items()
    }
    return {"type": ["object", "null"], "properties": keys, "additionalProperties": False}


def _trees() -> Iterator[Node]:
    for path in recipe_names().values():
        problems = Problems()
        text = read_file(path, str(path), problems, None)
        tree = parse(text, str(path), problems) if text is not None else None
        if tree is not None and not problems.reported:  # otherwise `rlcli validate` reports it
            yield spell_out_types(tree)


def _taker(reference: Reference, tree: Node) -> str | None:
    """The component whose `args` a reference is."""
    if not reference.is_alone or len(reference.target) > 1 or reference.path[-1:] != ("args",):
        return None
    kind = kind_at(reference.path[:-1])
    named = at(tree, (*reference.path[:-1], "type"))
    return f"{kind}.{module_name(str(named.value))}" if kind and isinstance(named, Scalar) else None


# -- parts -----------------------------------------------------------------------------------------


def _component_arguments(name: str, schema: Schema) -> Schema | None:
    homes = [f"{kind}.{module_name(name)}" for kind in registry.KINDS]
    definitions = [schema["$defs"][home] for home in homes if home in schema["$defs"]]
    return (
        definitions[0] if len(definitions) == 1 else {"anyOf": definitions} if definitions else None
    )


def _section(key: str, schema: Schema) -> Schema | None:
    """Follow a dotted key; a user-defined name (`models.actor`) matches any."""
    node = schema
    for word in key.split("."):
        forms = list(_objects(node, schema["$defs"]))
        candidates = [form["properties"][word] for form in forms if word in form["properties"]]
        candidates += [
            named for form in forms for named in form.get("patternProperties", {}).values()
        ]
        if not candidates or word == REPLACE:
            return None
        node = candidates[0]
    return node


def _objects(node: Schema, definitions: Mapping[str, Schema]) -> Iterator[Schema]:
    """The sections that a value may be."""
    if "$ref" in node:
        yield from _objects(definitions[node["$ref"].rpartition("/")[2]], definitions)
    for form in node.get("anyOf", ()):
        yield from _objects(form, definitions)
    if "properties" in node:
        yield node


def _reachable(node: Any, definitions: Mapping[str, Schema]) -> list[str]:
    names: dict[str, None] = {}
    waiting = [node]
    while waiting:
        node_below = waiting.pop()
        if isinstance(node_below, dict):
            target = node_below.get("$ref")
            if isinstance(target, str) and (name := target.rpartition("/")[2]) not in names:
                names[name] = None
                waiting.append(definitions[name])
            waiting.extend(node_below.values())
        elif isinstance(node_below, list):
            waiting.extend(node_below)
    return sorted(names)
