"""Completions of `models.actor.ba…` or `train.dataset=…`, derived from this recipe without checking
it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from rlcli.errors import RlcliError
from rlcli.recipe.components import signature_of
from rlcli.recipe.expansion.backends import with_backends
from rlcli.recipe.introspection.candidate import Candidate
from rlcli.recipe.introspection.docs import doc_of
from rlcli.recipe.parsing.finding import find_recipe, recipe_names
from rlcli.recipe.parsing.layers import collect
from rlcli.recipe.parsing.merge import merge, reference_below
from rlcli.recipe.parsing.overrides import parse_overrides
from rlcli.recipe.parsing.places import GRAPHS, Pattern, component_paths, kind_at, matches
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.removal import null_means, without_removed
from rlcli.recipe.parsing.tree import KeyPath, MappingNode, Mark, Node, Scalar, at, keys_at
from rlcli.recipe.schema import Recipe
from rlcli.recipe.schema_types import fields_of, inside, named_section_of, section_of
from rlcli.registry import names

Keys = dict[str, tuple[Any, str]]
"""Key → (its type, its description). The type of a section is a pydantic model, or BLOCK."""

BLOCK = object()
"""The type of a block, such as `ppo`: its keys depend on which components refer to it."""

_ROLES: tuple[Pattern, ...] = (
    *((*graph, "*", "model") for graph in GRAPHS),
    ("models", "*", "init"),
    ("graph", "*", "hooks", "copy_to"),
)
_DATASETS: tuple[Pattern, ...] = (("train", "dataset"), ("train", "eval", "dataset"))


def sketch(recipe: str, overrides: Sequence[str] = (), profiles: Sequence[str] = ()) -> MappingNode:
    """The layers of a recipe merged as far as they can be read; empty if there is none."""
    problems = Problems()
    tree: Node = MappingNode({}, Mark("", 0, 0))
    path = find_recipe(recipe, problems) if recipe else None
    if path is not None:
        trees = [layer.tree for layer in collect(path, problems, profiles)]
        for upper in (*trees, *parse_overrides(overrides, problems)):
            tree = merge(tree, upper, problems)
    assert isinstance(tree, MappingNode)
    return with_backends(without_removed(Recipe, tree, problems))


def override_candidates(
    tree: MappingNode, text: str, existing: Sequence[str] = ()
) -> list[Candidate]:
    """Completions of `key=value`; `given`: existing overrides, whose keys are not offered again."""
    key, equals, value = text.partition("=")
    if equals:
        return [
            Candidate(f"{key}={word}", doc)
            for word, doc in values(tree, key)
            if word.startswith(value)
        ]
    taken = {override.partition("=")[0] for override in existing}
    return [c for c in key_candidates(tree, text, end="=") if c.text.removesuffix("=") not in taken]


def key_candidates(tree: MappingNode, text: str, end: str = "") -> list[Candidate]:
    """Completions of a dotted key: sections end with a dot, values with `end`."""
    *above, partial = text.split(".")
    prefix = ".".join([*above, ""]) if above else ""
    candidates: list[Candidate] = []
    for name, (kind, doc) in _keys_at(tree, tuple(above)).items():
        if not name.startswith(partial) or "." in name:
            continue
        below = _is_section(kind) or isinstance(at(tree, (*above, name)), MappingNode)
        if not below or _has_shorthand(kind):
            candidates.append(Candidate(f"{prefix}{name}{end}", doc))
        if below:
            candidates.append(Candidate(f"{prefix}{name}.", doc))
    return candidates


def values(tree: MappingNode, key: str) -> list[tuple[str, str]]:
    """(word, description) of every value that a key is known to take, its current one first."""
    path = tuple(key.split("."))
    now = at(tree, path)
    if isinstance(now, MappingNode):
        now = now.get("type")
    words = {}
    if isinstance(now, Scalar) and now.text:
        words[now.text] = "current value"
    removal = (
        {"null": "remove it"}
        if at(tree, path) is not None and null_means(Recipe, path) == "gone"
        else {}
    )
    return list({**words, **dict.fromkeys(_legal(tree, path), ""), **words, **removal}.items())


def _legal(tree: MappingNode, path: KeyPath) -> Iterator[str]:
    """The words that a key takes."""
    component = kind_at(path) or (kind_at(path[:-1]) if path[-1] == "type" else None)
    if component is not None:
        yield from names(component)
        return
    for patterns, section in ((_ROLES, "models"), (_DATASETS, "datasets")):
        if any(matches(pattern, path) for pattern in patterns):
            yield from keys_at(tree, (section,))
    if matches(("models", "*", "path"), path):
        yield from (f"recipe:{name}#actor" for name in recipe_names() if "/" not in name)
    kind, _ = _keys_at(tree, path[:-1]).get(str(path[-1]), (None, ""))
    if _has_shorthand(kind):
        kind = inside(kind, "type")
    if not _is_section(kind):
        yield from _words(kind)


def _words(kind: Any) -> Iterator[str]:
    """Every value of a type with only a few."""
    if get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif kind is bool or (
        get_origin(kind) is not None and get_args(kind)[0] is bool
    ):  # Annotated[bool, Strict]
        yield from ("true", "false")
    elif kind is type(None):
        yield "null"
    elif get_origin(kind) not in (list, tuple, dict, set, frozenset):
        for member in get_args(kind):
            yield from _words(member)


# -- the keys of a section -------------------------------------------------------------------------


def _keys_at(tree: MappingNode, path: KeyPath) -> Keys:
    """The keys of a section in this recipe."""
    blocks = [name for name in tree.entries if name not in Recipe.model_fields]
    keys: Keys = {**_fields(Recipe), **dict.fromkeys(blocks, (BLOCK, ""))}
    for depth, key in enumerate(path, start=1):
        here = path[:depth]
        kind, _ = keys.get(str(key), (None, ""))
        component = kind_at(here[:-1]) if key == "args" else None
        if component is not None:
            keys = _arguments(tree, here[:-1], component)
        elif kind is BLOCK:
            keys = _block(tree, str(key))
        elif section := section_of(kind):
            keys = _fields(section)
        else:  # models: the roles of this recipe
            keys = dict.fromkeys(keys_at(tree, here), (inside(kind, "*") or Any, ""))
    return keys


def _fields(section: type[BaseModel]) -> Keys:
    return {
        key: (field.annotation, doc_of(section, key)) for key, field in fields_of(section).items()
    }


def _arguments(tree: MappingNode, path: KeyPath, kind: str) -> Keys:
    """The arguments of the component that a section names."""
    name = at(tree, (*path, "type"))
    if not isinstance(name, Scalar):
        return {}
    try:
        return _fields(signature_of(kind, name.text or str(name.value)).model())
    except RlcliError:
        return {}


def _block(tree: MappingNode, block: str) -> Keys:
    """The keys of a block such as `ppo`: the arguments of the components that use it as a whole."""
    keys: Keys = dict.fromkeys(keys_at(tree, (block,)), (Any, ""))
    for path, kind in component_paths(tree):
        if reference_below(at(tree, (*path, "args"))) == block:
            keys = {**keys, **_arguments(tree, path, kind)}
    return keys


def _is_section(kind: Any) -> bool:
    return kind is BLOCK or (section_of(kind) or named_section_of(kind)) is not None


def _has_shorthand(kind: Any) -> bool:
    """Whether a plain string names the type: `backend: fsdp`, `launch: local`."""
    section = section_of(kind)
    return section is not None and "type" in fields_of(section)
