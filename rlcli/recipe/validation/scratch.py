"""Checks `models.<role>.scratch` against its family's configuration class,
read from transformers' source."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcli.errors import ProjectError
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import (
    KeyPath,
    MappingNode,
    Mark,
    Scalar,
    at,
    dotted,
    keys_at,
    plain,
    with_value,
)
from rlcli.recipe.parsing.unresolved import Unresolved
from rlcli.recipe.validation.validate import check_against
from rlcli.registry import Argument
from rlcli.registry.arguments import arguments_model
from rlcli.registry.class_fields import arguments_of
from rlcli.registry.source import Definition, Module, read_module
from rlcli.spelling import nearest_name

_COMMON = (
    "model_type architectures dtype torch_dtype attn_implementation rope_theta rope_scaling "
    "rope_parameters partial_rotary_factor tie_word_embeddings is_decoder use_cache bos_token_id "
    "eos_token_id pad_token_id id2label label2id num_labels problem_type transformers_version"
)
"""Keys that transformers accepts in any family's configuration."""


def check_scratch(tree: MappingNode, problems: Problems, unresolved: Unresolved) -> MappingNode:
    """Check names, types and heads of every configuration.
    Returns the tree without invalid parts."""
    for name in keys_at(tree, ("models",)):
        path = ("models", name, "scratch")
        section = at(tree, path)
        kind = section.get("model_type") if isinstance(section, MappingNode) else None
        if not isinstance(section, MappingNode) or not isinstance(kind, Scalar):
            continue  # reported with the rest of the role
        family = _arguments(kind.value) if isinstance(kind.value, str) else None
        if family is not None:
            checked = _checked(section, family, path, problems, unresolved)
            tree = with_value(tree, path, checked)
        elif isinstance(kind.value, str):
            _check_family(kind.value, kind.mark, problems)
    return tree


def _check_family(model_type: str, mark: Mark, problems: Problems) -> None:
    """Report a family that is misspelt; others may be those of a newer transformers."""
    near = nearest_name(model_type, _families())
    if near is not None and not _is_part(model_type):
        message = f"transformers has no model_type {model_type!r}"
        problems.add("R70", message, mark, f"did you mean {near}?")


def _checked(
    section: MappingNode,
    family: Mapping[str, Argument],
    path: KeyPath,
    problems: Problems,
    unresolved: Unresolved,
) -> MappingNode:
    common = [key for key in section.entries if key in _COMMON.split() and key not in family]
    judged = section.without_keys(common)
    fields = [replace(family[key], name=key) for key in judged.entries if key in family]
    model = arguments_model("scratch", fields)
    checked = check_against(model, judged, problems, unresolved, prefix=path, legal=family)
    others = section.without_keys(judged.entries)
    valid = replace(section, entries=others.entries | checked.tree.entries)
    _check_heads(valid, family, path, problems)
    return valid


def _check_heads(
    section: MappingNode, family: Mapping[str, Argument], path: KeyPath, problems: Problems
) -> None:
    values = plain(section)
    sizes = {key: values.get(key, argument.default) for key, argument in family.items()}
    pairs = [("num_attention_heads", "num_key_value_heads")]
    pairs += [("hidden_size", "num_attention_heads")] if sizes.get("head_dim") is None else []
    for total, divisor in pairs:
        large, small = sizes.get(total), sizes.get(divisor)
        written = section.get(divisor) or section.get(total)
        if written is None or not isinstance(large, int) or not isinstance(small, int):
            continue
        if small > 0 and large % small:
            key = dotted((*path, divisor))
            _refuse_heads((total, large), (divisor, small), key, written.mark, problems)


def _refuse_heads(
    total: tuple[str, int], divisor: tuple[str, int], key: str, mark: Mark, problems: Problems
) -> None:
    message = f"{total[0]} ({total[1]}) must be a multiple of {divisor[0]} ({divisor[1]})"
    hint = f"for example {key}={math.gcd(total[1], divisor[1])}"
    problems.add("R49", message, mark, hint)


# -- transformers' source --------------------------------------------------------------------------


def _model_folders() -> list[Path]:
    """Where transformers has a folder for each family; none if it is not installed."""
    spec = find_spec("transformers")
    locations = spec.submodule_search_locations if spec is not None else None
    return [Path(location) / "models" for location in locations or ()]


@cache
def _families() -> tuple[str, ...]:
    """The families in transformers; none if it is not installed."""
    files = [file for folder in _model_folders() for file in folder.glob("*/configuration_*.py")]
    return tuple(sorted(file.parent.name for file in files))


def _is_part(model_type: str) -> bool:
    """Whether it may be part of a larger model, such as `gemma3_text`,
    defined in that model's file."""
    return any(model_type.startswith(f"{family}_") for family in _families())


@cache
def _arguments(model_type: str) -> Mapping[str, Argument] | None:
    """The fields of a family's configuration, aliases included; None if they cannot be read."""
    family = model_type.replace("-", "_")
    if not family.isidentifier():
        return None
    files = [folder / family / f"configuration_{family}.py" for folder in _model_folders()]
    try:
        for file in filter(Path.is_file, files):
            module = read_module(f"transformers.models.{family}.configuration_{family}", file)
            for node in module.classes.values():
                if _constants(node).get("model_type") == model_type:
                    return _fields_and_aliases(module, node) or None
    except ProjectError:
        return None
    return None


def _fields_and_aliases(module: Module, node: ast.ClassDef) -> dict[str, Argument]:
    """The fields of a configuration class by their names, and by the others that it gives them."""
    configuration = Definition(module, node.name, node)
    fields = {argument.name: argument for argument in arguments_of(configuration)}
    aliases = _constants(node).get("attribute_map", {})
    others = {alias: fields[meant] for alias, meant in aliases.items() if meant in fields}
    return {**others, **fields}


def _constants(node: ast.ClassDef) -> dict[str, Any]:
    """The `model_type` and `attribute_map` of a class."""
    constants: dict[str, Any] = {}
    for statement in node.body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=("model_type" | "attribute_map") as name)], value=value
            ):
                constants[name] = ast.literal_eval(value)
    return constants
