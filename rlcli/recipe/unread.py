"""Overrides on the command line that nothing reads are refused: they would have no effect.

A layer may have such keys, for just some of the recipes that extend it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlcli.recipe.call_generation import GENERATION, with_generation
from rlcli.recipe.parsing.interpolation import references_in
from rlcli.recipe.parsing.places import GRAPHS
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import KeyPath, MappingNode, at, dotted, key_mark, keys_at, leaves
from rlcli.recipe.schema import Generation
from rlcli.spelling import did_you_mean


def refuse_unread(
    blocks: set[str],
    tree: MappingNode,
    layer_trees: Sequence[MappingNode],
    override_trees: Sequence[MappingNode],
    problems: Problems,
) -> None:
    """Refuse a key of a block that only the command line has, and that no reference leads to; and a
    setting of generation that calls have of their own. `tree`: all layers merged, with references
    as written."""
    written = _targets([*layer_trees, *override_trees])
    read = _targets([tree])
    for override in override_trees:
        if not blocks.isdisjoint(override.entries):
            _refuse_keys_of_blocks(override, written, layer_trees, problems)
        if GENERATION in override.entries and with_generation(tree) is tree:
            _refuse_generation(override, read, tree, problems)


def _targets(trees: Sequence[MappingNode]) -> set[KeyPath]:
    """What references lead to."""
    return {reference.target for tree in trees for reference in references_in(tree)}


def _refuse_keys_of_blocks(
    override: MappingNode,
    targets: set[KeyPath],
    layer_trees: Sequence[MappingNode],
    problems: Problems,
) -> None:
    for path in _without_reference(override, targets):
        # no other override has it either, for what is set twice is refused
        if all(at(tree, path) is None for tree in layer_trees):
            key, keys = str(path[-1]), keys_at(problems.written, path[:-1])
            hint = did_you_mean(key, (name for name in keys if name != key))
            mark = key_mark(override, path)
            problems.add("R42", f"unknown key {dotted(path)}", mark, hint, width=len(key))


def _refuse_generation(
    override: MappingNode, targets: set[KeyPath], tree: MappingNode, problems: Problems
) -> None:
    for path in _without_reference(override, targets):
        setting = str(path[-1])
        if path != (GENERATION, setting) or setting not in Generation.model_fields:
            continue  # an unknown key is refused as such
        of_calls = [dotted(key) for key in _settings_of_calls(tree, setting)]
        if of_calls:
            message = f"{dotted(path)} has no effect: each call has its own"
            problems.add("R42", message, key_mark(override, path), f"set {', '.join(of_calls)}")


def _without_reference(override: MappingNode, targets: set[KeyPath]) -> Iterator[KeyPath]:
    """The keys of an override that no reference to one of these targets leads to."""
    for path, _ in leaves(override):
        if not any(path[: len(target)] == target[: len(path)] for target in targets):
            yield path


def _settings_of_calls(tree: MappingNode, setting: str) -> Iterator[KeyPath]:
    """The keys of a setting of generation in the arguments of calls."""
    for graph in GRAPHS:
        for call in keys_at(tree, graph):
            args = (*graph, call, "interface", "args")
            if at(tree, (*args, GENERATION)) is not None:
                yield (*args, GENERATION, setting)
            if at(tree, (*args, setting)) is not None:
                yield (*args, setting)
