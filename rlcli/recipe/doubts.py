"""What is known to be broken already, so that no second problem is concluded from it."""

from __future__ import annotations

from typing import cast

from rlcli.recipe.tree import Mapping, Node, Path, Scalar, at, nodes, with_value


class Doubts:
    """Places of a recipe for which a problem was reported."""

    def __init__(self) -> None:
        self.values: set[Path] = set()
        """Values that were dropped, or for which something else stands."""
        self.lacking: set[Path] = set()
        """Mappings with a key that was dropped: it may have been meant to be any that they lack."""

    def about(self, path: Path) -> bool:
        """Whether a value was dropped, by itself or with all around it."""
        return any(path[: len(one)] == one for one in self.values)

    def about_entries(self, path: Path) -> bool:
        """Whether a section was dropped, or one of its entries as a whole."""
        return self.about(path) or any(one[:-1] == path for one in self.values)

    def about_part(self, path: Path) -> bool:
        """Whether a value or any part of it was dropped, or may lack something."""
        return self.about(path) or any(one[: len(path)] == path for one in (*self.values, *self.lacking))

    def about_absence(self, tree: Node, path: Path) -> bool:
        """Whether a key that no layer sets, or that is null, may have been meant to be something."""
        for depth in range(len(path)):
            node = at(tree, path[: depth + 1])
            if node is None or (isinstance(node, Scalar) and node.value is None):
                return self.about(path) or path[:depth] in self.lacking
        return self.about(path)

    def without_unsound(self, tree: Mapping) -> Mapping:
        """The tree without the values that could not be had; they are noted here."""
        for path in [path for path, node in nodes(tree) if isinstance(node, Scalar) and not node.sound]:
            tree = self.drop_from(tree, path)
        self.lacking |= {path for path, node in nodes(tree) if isinstance(node, Mapping) and not node.sound}
        return tree

    def drop_from(self, tree: Mapping, path: Path) -> Mapping:
        """The tree without a value; of a list without the whole list, for its other items would move."""
        path = next((path[:depth] for depth, part in enumerate(path) if isinstance(part, int)), path)
        self.values.add(path)
        if not path:
            return Mapping({}, tree.mark)
        return cast(Mapping, with_value(tree, path, None)) if at(tree, path) is not None else tree
