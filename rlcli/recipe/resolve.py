"""`load_recipe`: from a file and overrides to one validated recipe in which every value knows its
origin."""

from __future__ import annotations

import os
import re
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlcli.errors import RlcliError, raise_all
from rlcli.project import is_built_in, search_paths_kept
from rlcli.recipe.components import signature_of
from rlcli.recipe.expansion.backends import with_backends
from rlcli.recipe.expansion.call_keys import with_keys_of_calls
from rlcli.recipe.expansion.generation import with_generation
from rlcli.recipe.expansion.preparation import with_preparation
from rlcli.recipe.expansion.rollouts import as_rollout, with_rollouts
from rlcli.recipe.named_files import with_found_files
from rlcli.recipe.parsing.defaults import with_lists_to_extend
from rlcli.recipe.parsing.finding import find_recipe
from rlcli.recipe.parsing.interpolation import (
    interpolate,
    referenced_blocks,
    references_in,
)
from rlcli.recipe.parsing.layers import Layer, collect
from rlcli.recipe.parsing.merge import merge, spell_out_types, whole_reference
from rlcli.recipe.parsing.overrides import parse_overrides
from rlcli.recipe.parsing.places import GRAPHS
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.removal import is_entry, removed_at, without_removed
from rlcli.recipe.parsing.tree import (
    Entry,
    KeyPath,
    MappingNode,
    Mark,
    Node,
    Scalar,
    at,
    deepest,
    default_mark,
    dotted,
    is_null,
    key_mark,
    keys_at,
    leaves,
    nodes,
    plain,
    without,
)
from rlcli.recipe.parsing.unresolved import Unresolved
from rlcli.recipe.parsing.write import to_yaml
from rlcli.recipe.schema import FORMAT, SECTIONS, Recipe
from rlcli.recipe.validation.component_arguments import check_components
from rlcli.recipe.validation.scratch import check_scratch
from rlcli.recipe.validation.semantics import check_semantics
from rlcli.recipe.validation.semantics.effects import refuse_unread
from rlcli.recipe.validation.validate import check_against

MAX_NAMES = 256
"""Most roles, datasets or calls of a recipe."""


@dataclass(frozen=True)
class Setting:
    """One place that sets a key."""

    mark: Mark
    value: Any
    """As written: references are not resolved."""
    via: str | None = None
    """The key that a reference passed through, such as `ppo.kl_ctl`."""
    through: Mark | None = None
    """Where that reference is written."""
    removes: str | None = None
    """The section around the key that a null removes, such as `graph.critic_inf`."""


@dataclass(frozen=True)
class Resolved:
    """A resolved recipe, ready to run."""

    recipe: Recipe
    path: Path
    """The recipe's file."""
    layers: tuple[Layer, ...]
    """The files that make up the recipe, lowest first, each with its text as written."""
    overrides: tuple[str, ...]
    """`key.path=value` from the command line, as given."""
    tree: MappingNode
    """The layers merged, with references resolved; without defaults."""
    override_trees: tuple[MappingNode, ...] = ()
    profiles: tuple[str, ...] = ()
    """Layers added on the command line, as given; their files are the last of `layers`."""
    problems: Problems = field(default_factory=Problems, compare=False, repr=False)
    """Holds the sources, so that later checks can quote them."""
    derived: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What other modules derive from it once, because it takes long."""

    def origin(self, key: str | KeyPath) -> Mark:
        """Where the effective value was written; `default` if no layer sets it."""
        node = at(self.tree, _path(key))
        return node.mark if node is not None else default_mark()

    def history(self, key: str | KeyPath) -> list[Setting]:
        """Every place that sets the key, lowest layer first; the last one wins."""
        path = _path(key)
        written = self._history(path, frozenset()) or self._history(as_rollout(path), frozenset())
        return written or self._derived(path)

    def _derived(self, path: KeyPath) -> list[Setting]:
        """The place of a value that was written for another key, such as an argument of the call
        that computes it."""
        node = at(self.tree, path)
        return (
            [Setting(node.mark, plain(node))]
            if node is not None and not node.mark.is_default
            else []
        )

    def _history(self, path: KeyPath, seen: frozenset[str]) -> list[Setting]:
        settings: list[Setting] = []
        for tree in self.trees:
            holder, rest = deepest(tree, path)
            if not rest:
                settings.append(Setting(holder.mark, plain(holder)))
            elif is_null(holder):
                section = dotted(path[: -len(rest)])
                settings.append(Setting(holder.mark, None, removes=section))
            reference = whole_reference(holder)
            if reference is not None and not reference.startswith("env:"):
                target = (*reference.split("."), *rest)
                if dotted(target) not in seen:
                    through = self._history(target, seen | {dotted(target)})
                    settings.extend(
                        replace(s, via=s.via or dotted(target), through=s.through or holder.mark)
                        for s in through
                        if s not in settings
                    )
        return settings

    @property
    def trees(self) -> list[MappingNode]:
        """What each layer and then each override sets, references as written."""
        return [*(layer.tree for layer in self.layers), *self.override_trees]

    @cached_property
    def written(self) -> MappingNode:
        """The layers merged, with references as written, including the recipe's own blocks."""
        return _laid_over(self.path, self.layers, self.override_trees, Problems())

    @cached_property
    def origins(self) -> dict[str, str]:
        """Key → `file:line:col` or `command line`, for every value set by a layer; `default` and
        what chose it, for derived values."""
        return {dotted(path): str(node.mark) for path, node in leaves(self.tree) if path}

    @property
    def values_set(self) -> int:
        """Number of values that some layer sets."""
        return sum(not node.mark.is_default for path, node in leaves(self.tree) if path)

    @cached_property
    def removed(self) -> dict[str, Mark]:
        """Key → where a null removes it, for entries under user-defined names and for blocks."""
        taken = {
            path: node.mark for path, node in nodes(self.written) if removed_at(self.written, path)
        }
        return {dotted(path): mark for path, mark in taken.items() if is_entry(path)}

    def to_json(self) -> dict[str, Any]:
        """The whole recipe with all defaults; `Recipe.model_validate` reads it back."""
        return self.recipe.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The whole recipe with all defaults, as a recipe of one layer that loads to the same."""
        return to_yaml(self.to_json())


def _path(key: str | KeyPath) -> KeyPath:
    return tuple(key.split(".")) if isinstance(key, str) else key


@search_paths_kept()
def load_recipe(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    profiles: Sequence[str] = (),
    fresh: bool = True,
) -> Resolved:
    """Read, merge, resolve and check a recipe, by path or by name. Raises RecipeError with all
    problems: if one of them leaves something open, the rest is checked around it.

    `profiles` are layers applied on top of the recipe's own (`--with`), each a file or a name in
    `recipes/profiles`; overrides come on top of them. Neither applies to a recipe that this one
    starts from (`path: recipe:sft_math#actor`): that is a separate experiment, whose result can be
    reused. `fresh`: reread components.
    """
    if fresh:
        signature_of.cache_clear()
    problems = Problems()
    path = find_recipe(recipe, problems)
    if path is None:
        parse_overrides(overrides, problems)  # report their mistakes as well
        problems.raise_if_any()
    assert path is not None
    return resolve_layers(path, collect(path, problems, profiles), overrides, profiles, problems)


def resolve_layers(
    path: Path,
    layers: Sequence[Layer],
    overrides: Sequence[str],
    profiles: Sequence[str],
    problems: Problems,
) -> Resolved:
    """Resolve layers that have been read. Raises RecipeError with all problems,
    including known ones."""
    override_trees = parse_overrides(overrides, problems)
    if problems.is_cut_off:
        problems.raise_if_any()
    problems.layers = {layer.file: is_built_in(layer.path) for layer in layers}
    tree, blocks = _merged(path, layers, override_trees, problems)
    _refuse_newer_format(tree, problems)
    _refuse_absurd_counts(tree, problems)
    if problems.is_cut_off:
        problems.raise_if_any()
    recipe, tree = _checked(tree, blocks, problems)
    resolved = Resolved(
        recipe=recipe,
        path=path,
        layers=tuple(layers),
        overrides=tuple(overrides),
        profiles=tuple(profiles),
        tree=tree,
        override_trees=tuple(override_trees),
        problems=problems,
    )
    try:
        return replace(
            resolved, recipe=with_found_files(resolved.recipe, resolved.tree, path, layers)
        )
    except RlcliError as error:
        raise_all([error, *_missing_of_sources(resolved)])
        raise


def _checked(tree: MappingNode, blocks: set[str], problems: Problems) -> tuple[Recipe, MappingNode]:
    """The recipe of a merged tree, and the tree with what follows from it. Raises RecipeError with
    all problems."""
    unresolved = Unresolved()
    tree = without_removed(Recipe, unresolved.without_invalid(tree), problems)
    tree = with_preparation(tree, problems)
    tree = with_generation(with_backends(tree, unresolved))
    tree = check_components(tree, problems, unresolved)
    tree = check_scratch(tree, problems, unresolved)
    checked = check_against(Recipe, tree, problems, unresolved, blocks=blocks)
    recipe, tree = checked.value, checked.tree
    if recipe is not None and not problems.is_cut_off:
        recipe, tree = with_rollouts(recipe, tree, problems, unresolved)
        recipe, tree = with_keys_of_calls(recipe, tree, unresolved)
        check_semantics(recipe, tree, problems, unresolved)
    problems.raise_if_any()
    assert recipe is not None
    return recipe, tree


def _missing_of_sources(resolved: Resolved) -> list[RlcliError]:
    """What the recipes that this one starts from lack:
    reported together with its own missing files."""
    from rlcli.recipe.warm_start import warm_starts

    try:
        warm_starts(resolved)
    except RlcliError as error:
        return [error]
    return []


def _refuse_newer_format(tree: MappingNode, problems: Problems) -> None:
    """A recipe for a newer rlcli would be misunderstood."""
    number = tree.get("format")
    if isinstance(number, Scalar) and type(number.value) is int and number.value > FORMAT:
        message = f"the recipe has format {number.value}; this rlcli reads up to {FORMAT}"
        problems.add("F85", message, number.mark, "use a newer rlcli")
        problems.is_cut_off = True


def _without_built_in_length(tree: MappingNode, problems: Problems) -> MappingNode:
    """The tree, with references as written, without the steps or epochs of a built-in layer, if the
    user sets the other. References to what is left out are reported."""
    lengths = {name: at(tree, ("train", name)) for name in ("steps", "epochs")}
    not_the_users = [
        name
        for name, node in lengths.items()
        if node is None or is_null(node) or problems.is_built_in(node.mark)
    ]
    if len(not_the_users) != 1 or lengths[not_the_users[0]] is None:
        return tree
    path = ("train", not_the_users[0])
    (users,) = set(lengths) - {not_the_users[0]}
    for reference in references_in(tree):
        if reference.target == path:
            message = f"${{{dotted(path)}}}: nothing is set there, because train.{users} is"
            problems.add("R61", message, key_mark(tree, reference.path), "write the number out")
    return without(tree, path)


def _refuse_absurd_counts(tree: MappingNode, problems: Problems) -> None:
    """More roles, datasets or calls than any real recipe has would only cost time to check."""
    for path in (("models",), ("datasets",), *GRAPHS):
        names = keys_at(tree, path)
        if len(names) > MAX_NAMES:
            problems.add(
                "R35",
                f"{dotted(path)} holds {len(names)} names; at most {MAX_NAMES}",
                key_mark(tree, path),
            )
            problems.is_cut_off = True


def _merged(
    path: Path, layers: Sequence[Layer], override_trees: Sequence[MappingNode], problems: Problems
) -> tuple[MappingNode, set[str]]:
    """All layers merged, references resolved, shorthands spelt out; and the names of the
    blocks, the recipe's own mappings that references lead to."""
    tree = problems.written = _laid_over(path, layers, override_trees, problems)
    tree = _without_built_in_length(tree, problems)
    spelt = spell_out_types(interpolate(tree, problems, os.environ))
    assert isinstance(spelt, MappingNode)
    layer_trees = [layer.tree for layer in layers]
    orphaned = _orphaned_blocks([*layer_trees, *override_trees])
    blocks = (referenced_blocks(tree) | orphaned) - set(SECTIONS)
    refuse_unread(blocks, tree, layer_trees, override_trees, problems)
    return spelt.without_keys(blocks), blocks


def _orphaned_blocks(layers: Sequence[MappingNode]) -> set[str]:
    """Blocks that every layer defining them also refers to: if nothing refers to one in the end, a
    later layer replaced the reference, and the block no longer matters."""
    referred = [referenced_blocks(layer) for layer in layers]
    pairs = list(zip(layers, referred, strict=True))

    def is_orphaned(block: str) -> bool:
        return all(block in references for layer, references in pairs if block in layer.entries)

    return set(filter(is_orphaned, set().union(*referred)))


def _laid_over(
    path: Path, layers: Sequence[Layer], override_trees: Sequence[MappingNode], problems: Problems
) -> MappingNode:
    """All layers merged, references as written."""
    stem = _default_name(path.stem)
    name = Scalar(stem, default_mark(), stem, plain=False)
    recipe_layer = next((layer for layer in layers if layer.path == path), layers[-1])
    tree: Node = MappingNode({"name": Entry(name.mark, name)}, recipe_layer.tree.mark)
    for upper in (*(layer.tree for layer in layers), *override_trees):
        tree = merge(with_lists_to_extend(tree, upper), upper, problems)
    assert isinstance(tree, MappingNode)
    return replace(tree, mark=recipe_layer.tree.mark)


def _default_name(stem: str) -> str:
    """The name of a recipe whose layers set none, from that of its file. Names in other scripts
    differ by a checksum, so that their runs do not share a folder."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", stem).lstrip("._-")[:64]
    if stem.isascii() or re.search("[A-Za-z]", name):
        return name or "recipe"
    return f"recipe_{zlib.crc32(unicodedata.normalize('NFC', stem).encode()):08x}"
