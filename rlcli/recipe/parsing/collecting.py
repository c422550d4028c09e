"""All layers of a recipe: its own, then those of `--with`, which must fit it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlcli.recipe.parsing.layers import (
    Collector,
    Layer,
    find_profile,
    profile_names,
    recipe_names,
    recipe_roots,
    with_option,
)
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import Node, at, entries_at, value_at
from rlcli.spelling import nearest_name


def collect(path: Path, problems: Problems, profiles: Sequence[str] = ()) -> list[Layer]:
    """All layers of a recipe, lowest first, those of `--with` last. A layer reached twice counts
    where it came first; one named by `--with` must be new,
    because otherwise it would not be on top."""
    collector = Collector(recipe_roots(), problems)
    collector.add(path, path.name, None)
    for profile in profiles:
        if file := find_profile(profile, problems):
            below = collector.layers[:]
            collector.lay(file, with_option(profile))
            _check_base(profile, below, collector.layers, problems)
        else:
            problems.is_cut_off = True
    return collector.layers


def _check_base(
    profile: str, below: Sequence[Layer], layers: Sequence[Layer], problems: Problems
) -> None:
    """Refuse a layer of `--with` that sets the block of an algorithm's base, such as `ppo` of
    `base/ppo`, for a recipe that does not extend it."""
    bases = _bases_needed(layers[len(below) :], below)
    if not bases:
        return
    recipe = below[-1].path.stem if below else "the recipe"
    fitting = [name for name, path in profile_names().items() if _fits(_layers_of(path), below)]
    near = nearest_name(profile, fitting)
    message = f"{profile} is for recipes that extend {bases[0]}, and {recipe} does not"
    hint = f"did you mean --with {near}?" if near else f"profiles that fit: {', '.join(fitting)}"
    problems.add("R51", message, with_option(profile), hint)
    problems.is_cut_off = True


def _bases_needed(layers: Sequence[Layer], below: Sequence[Layer]) -> list[str]:
    """The bases whose blocks some layers set, but none of those below."""
    from rlcli.recipe.schema import SECTIONS  # names of recipes are listed without it

    keys = {key for layer in layers for key in layer.tree.entries}
    keys -= {key for layer in below for key in layer.tree.entries}
    files, named = [layer.path.resolve() for layer in (*layers, *below)], recipe_names()
    bases = {f"base/{key}": named.get(f"base/{key}") for key in sorted(keys - {*SECTIONS})}
    return [base for base, path in bases.items() if path and path.resolve() not in files]


def _fits(layers: Sequence[Layer], below: Sequence[Layer]) -> bool:
    """Whether the recipe of the layers below has what some layers change: the blocks, the calls,
    and for a rollout one that samples."""
    names = {name for name, _ in _named("graph", below)}
    changed = {name for name, call in _named("graph", layers) if at(call, ("call",)) is None}
    samples = any(value_at(call, ("call",)) == "generate" for _, call in _named("graph", below))
    has_rollout = any(at(role, ("rollout",)) for _, role in _named("models", layers))
    if has_rollout and not samples:
        return False
    return changed <= names and not _bases_needed(layers, below)


def _named(section: str, layers: Sequence[Layer]) -> list[tuple[str, Node]]:
    """The entries of a section in some layers: names, and what each layer says."""
    return [
        (name, entry.node)
        for layer in layers
        for name, entry in entries_at(layer.tree, (section,)).items()
    ]


def _layers_of(path: Path) -> list[Layer]:
    """A layer with those that it extends, lowest first."""
    collector = Collector(recipe_roots(), Problems())
    collector.add(path, path.name, None)
    return collector.layers
