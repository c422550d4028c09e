"""Calls that sample take the recipe's section `generation`, unless they have settings of their
own."""

from __future__ import annotations

from rlcli.recipe.lengths import default_generation
from rlcli.recipe.parsing.places import GRAPHS
from rlcli.recipe.parsing.tree import KeyPath, MappingNode, entries_at, value_at, with_entry

GENERATION = "generation"
"""The section from which calls take their settings, by references or because they have none. In a
resolved recipe these are spelt out, so that nothing leads to it."""


def with_generation(tree: MappingNode) -> MappingNode:
    """The tree, with the section as the argument of its name of each interface that has one, and no
    defaults of its own, where no layer sets it."""
    section = tree.entries.get(GENERATION)
    if section is None:
        return tree
    for graph in GRAPHS:
        for name in entries_at(tree, graph):
            interface = (*graph, name, "interface")
            if _lacks_settings(tree, interface):
                tree = with_entry(tree, (*interface, "args", GENERATION), section)
    return tree


def _lacks_settings(tree: MappingNode, interface: KeyPath) -> bool:
    kind, args = value_at(tree, (*interface, "type")), value_at(tree, (*interface, "args"))
    if args is not None and not isinstance(args, dict):
        return False  # reported with the other arguments
    takes_section = default_generation(str(kind)) == {}
    return takes_section and GENERATION not in (args or {})
