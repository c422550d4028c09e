"""What is already known to be broken, so that no follow-up problem is reported."""

from __future__ import annotations

from rlcli.recipe.parsing.tree import (
    KeyPath,
    MappingNode,
    Node,
    Scalar,
    at,
    is_null,
    is_within,
    nodes,
    without,
)


class Unresolved:
    """Places in a recipe for which a problem was reported."""

    def __init__(self) -> None:
        self.values: set[KeyPath] = set()
        """Values that were dropped or replaced."""
        self.lacking: set[KeyPath] = set()
        """Mappings with a dropped key, which may have been meant as any key they lack."""

    def about(self, path: KeyPath) -> bool:
        """Whether a value was dropped, alone or with a section around it."""
        return any(is_within(path, dropped) for dropped in self.values)

    def about_entries(self, path: KeyPath) -> bool:
        """Whether a section, or one of its entries as a whole, was dropped."""
        return self.about(path) or any(dropped[:-1] == path for dropped in self.values)

    def about_part(self, path: KeyPath) -> bool:
        """Whether a value or any part of it was dropped, or may lack something."""
        return self.about(path) or any(
            is_within(doubtful, path) for doubtful in (*self.values, *self.lacking)
        )

    def about_absence(self, tree: Node, path: KeyPath) -> bool:
        """Whether a key that no layer sets, or that is null,
        may have been intended to have a value."""
        for depth in range(len(path)):
            node = at(tree, path[: depth + 1])
            if node is None or is_null(node):
                return self.about(path) or path[:depth] in self.lacking
        return self.about(path)

    def without_invalid(self, tree: MappingNode) -> MappingNode:
        """The tree without its unusable values, which are recorded here."""
        for path in [
            path for path, node in nodes(tree) if isinstance(node, Scalar) and not node.valid
        ]:
            tree = self.drop_from(tree, path)
        self.lacking |= {
            path for path, node in nodes(tree) if isinstance(node, MappingNode) and not node.valid
        }
        return tree

    def drop_from(self, tree: MappingNode, path: KeyPath) -> MappingNode:
        """The tree without a value; for a list item, without the whole list,
        because other items would shift."""
        path = next((path[:depth] for depth, key in enumerate(path) if isinstance(key, int)), path)
        self.values.add(path)
        if not path:
            return MappingNode({}, tree.mark)
        return without(tree, path)
