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
from rlcli.registry.source import Definition, read_module
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
        section, path = at(tree, ("models", name, "scratch")), ("models", name, "scratch")
        kind = section.get("model_type") if isinstance(section, MappingNode) else None
        if (
            not isinstance(section, MappingNode)
            or not isinstance(kind, Scalar)
            or not isinstance(kind.value, str)
        ):
            continue  # reported with the rest of the role
        family = _arguments(kind.value)
        if family is not None:
            checked = _checked(section, family, path, problems, unresolved)
            tree = with_value(tree, path, checked)
        elif (near := nearest_name(kind.value, _families())) is not None and not _is_part(
            kind.value
        ):
            problems.add(
                "R70",
                f"transformers has no model_type {kind.value!r}",
                kind.mark,
                f"did you mean {near}?",
            )
    return tree


def _checked(
    section: MappingNode,
    family: Mapping[str, Argument],
    path: KeyPath,
    problems: Problems,
    unresolved: Unresolved,
) -> MappingNode:
    judged = {
        key: entry
        for key, entry in section.entries.items()
        if key in family or key not in _COMMON.split()
    }
    model = arguments_model(
        "scratch", [replace(family[key], name=key) for key in judged if key in family]
    )
    checked = check_against(
        model, replace(section, entries=judged), problems, unresolved, prefix=path, legal=family
    )
    others = {key: entry for key, entry in section.entries.items() if key not in judged}
    valid = replace(section, entries=others | checked.tree.entries)
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
        written = next(
            (node for key in (divisor, total) if (node := section.get(key)) is not None), None
        )
        if (
            written is None
            or not isinstance(large, int)
            or not isinstance(small, int)
            or small <= 0
        ):
            continue
        if large % small:
            key = dotted((*path, divisor))
            _refuse_heads((total, large), (divisor, small), key, written.mark, problems)


def _refuse_heads(
    total: tuple[str, int], divisor: tuple[str, int], key: str, mark: Mark, problems: Problems
) -> None:
    message = f"{total[0]} ({total[1]}) must be a multiple of {divisor[0]} ({divisor[1]})"
    hint = f"for example {key}={math.gcd(total[1], divisor[1])}"
    problems.add("R49", message, mark, hint)


# -- transformers' source --------------------------------------------------------------------------


@cache
def _families() -> tuple[str, ...]:
    """The model folders in transformers; none if it is not installed."""
    spec = find_spec("transformers")
    locations = spec.submodule_search_locations if spec is not None else None
    folders = [Path(location) / "models" for location in locations or ()]
    return tuple(
        sorted(
            file.parent.name for folder in folders for file in folder.glob("*/configuration_*.py")
        )
    )


def _is_part(model_type: str) -> bool:
    """Whether it may be part of a larger model, such as `gemma3_text`,
    defined in that model's file."""
    return any(model_type.startswith(f"{family}_") for family in _families())


@cache
def _arguments(model_type: str) -> Mapping[str, Argument] | None:
    """The fields of a family's configuration, aliases included; None if they cannot be read."""
    spec = find_spec("transformers")
    name = model_type.replace("-", "_")
    locations = (
        spec.submodule_search_locations if spec is not None and name.isidentifier() else None
    )
    for location in locations or ():
        file = Path(location) / "models" / name / f"configuration_{name}.py"
        if not file.is_file():
            continue
        try:
            module = read_module(f"transformers.models.{name}.configuration_{name}", file)
            for node in module.classes.values():
                constants = dict(_constants(node))
                if constants.get("model_type") == model_type:
                    fields = {
                        argument.name: argument
                        for argument in arguments_of(Definition(module, node.name, node))
                    }
                    aliases = constants.get("attribute_map", {})
                    others = {
                        alias: fields[meant] for alias, meant in aliases.items() if meant in fields
                    }
                    return {**others, **fields} if fields else None
        except ProjectError:
            return None
    return None


def _constants(node: ast.ClassDef) -> list[tuple[str, Any]]:
    constants: list[tuple[str, Any]] = []
    for statement in node.body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=("model_type" | "attribute_map") as name)], value=value
            ):
                constants.append((name, ast.literal_eval(value)))
    return constants
