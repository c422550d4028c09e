"""The tree that a recipe is parsed into: plain YAML values, each with its position."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeGuard

COMMAND_LINE = "command line"
DEFAULT = "default"

KeyPath = tuple["str | int", ...]
"""Keys and list indices from the top of a recipe down to a value."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in a file; line and column count from 1. On the command line, line n is the n-th
    override, and line 0 an option such as `--with gpu8`, which then replaces the file name."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        is_one_line = self.file == COMMAND_LINE or self.is_default or not self.line
        return self.file if is_one_line else f"{self.file}:{self.line}:{self.column}"

    @property
    def is_default(self) -> bool:
        """Whether no layer wrote the value."""
        return is_default(self.file)

    @property
    def file_and_line(self) -> str:
        """`recipes/mine.yaml:3`."""
        return f"{self.file}:{self.line}" if self.line else self.file


def is_default(origin: str) -> bool:
    """Whether an origin is the default; what chose the value may follow: `default,
    READS of ppo_actor`."""
    return origin.split(",")[0] == DEFAULT


def default_mark(chosen_by: str = "") -> Mark:
    """The mark of a value that no layer wrote."""
    return Mark(f"{DEFAULT}, {chosen_by}" if chosen_by else DEFAULT, 0, 0)


@dataclass(frozen=True, slots=True)
class Scalar:
    value: bool | int | float | str | None
    mark: Mark
    text: str = ""
    """As written, without quotes."""
    plain: bool = True
    """Written without quotes: a field of type str may still need the text `1.10` and not the
    number."""
    valid: bool = True
    """False for an unusable value. That is already reported,
    so nothing may be concluded from it."""
    over: Node | None = field(default=None, repr=False)
    """For a null, and for the type of a component: what the layers below say here."""


@dataclass(frozen=True, slots=True)
class Listing:
    items: tuple[Node, ...]
    mark: Mark


@dataclass(frozen=True, slots=True)
class Entry:
    key: Mark
    node: Node


@dataclass(frozen=True, slots=True)
class MappingNode:
    entries: dict[str, Entry]
    mark: Mark
    under: Scalar | None = field(default=None)
    """A whole-value reference `${a.b}` in a lower layer: these entries override its target."""
    valid: bool = True
    """False if some key was unusable, which is already reported."""

    def get(self, key: str) -> Node | None:
        entry = self.entries.get(key)
        return entry.node if entry else None

    def without_keys(self, keys: Collection[str]) -> MappingNode:
        """The mapping without the entries of some keys."""
        remaining = {key: entry for key, entry in self.entries.items() if key not in keys}
        return replace(self, entries=remaining)


Node = Scalar | MappingNode | Listing


def children(node: Node) -> Iterator[tuple[str | int, Node]]:
    """What a section or a list holds, by key or index; nothing for a scalar."""
    if isinstance(node, MappingNode):
        yield from ((key, entry.node) for key, entry in node.entries.items())
    elif isinstance(node, Listing):
        yield from enumerate(node.items)


def with_children(node: Node, changed: Callable[[str | int, Node], Node]) -> Node:
    """A copy of a section or a list with each of its children changed; a scalar as it is."""
    if isinstance(node, MappingNode):
        entries = {
            key: Entry(entry.key, changed(key, entry.node)) for key, entry in node.entries.items()
        }
        return replace(node, entries=entries)
    if isinstance(node, Listing):
        return replace(node, items=tuple(changed(*child) for child in children(node)))
    return node


def plain(node: Node, value_of: Callable[[Scalar], Any] = attrgetter("value")) -> Any:
    """The Python value of a tree: dict, list, str, int, float, bool or None."""
    if isinstance(node, Scalar):
        return value_of(node)
    values = {key: plain(child, value_of) for key, child in children(node)}
    return values if isinstance(node, MappingNode) else [*values.values()]


def node_of(value: Any, mark: Mark) -> Node:
    """The tree of a plain value, all of it written at one place."""
    if isinstance(value, dict):
        return MappingNode(
            {key: Entry(mark, node_of(item, mark)) for key, item in value.items()}, mark
        )
    if isinstance(value, list | tuple):
        return Listing(tuple(node_of(item, mark) for item in value), mark)
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return Scalar(value, mark, text)


def at(node: Node, path: KeyPath) -> Node | None:
    """The node at a path, or None if the path does not exist."""
    for key in path:
        child: Node | None = None
        if isinstance(node, MappingNode) and isinstance(key, str):
            child = node.get(key)
        elif isinstance(node, Listing) and isinstance(key, int) and key < len(node.items):
            child = node.items[key]
        if child is None:
            return None
        node = child
    return node


def is_null(node: Node | None) -> TypeGuard[Scalar]:
    """Whether a node exists and is null."""
    return isinstance(node, Scalar) and node.value is None


def unusable(mark: Mark, text: str = "") -> Scalar:
    """What stands for a value that cannot be used, which is already reported."""
    return Scalar(None, mark, text, valid=False)


def entries_at(node: Node, path: KeyPath = ()) -> dict[str, Entry]:
    """The entries of the mapping at a path; none where there is no mapping."""
    mapping = at(node, path)
    return mapping.entries if isinstance(mapping, MappingNode) else {}


def value_at(node: Node, path: KeyPath) -> Any:
    """The Python value at a path, or None if the path does not exist."""
    child = at(node, path)
    return plain(child) if child is not None else None


def keys_at(node: Node, path: KeyPath) -> list[str]:
    """The keys of the mapping at a path; none where there is no mapping."""
    return list(entries_at(node, path))


def is_within(path: KeyPath, section: KeyPath) -> bool:
    """Whether a path is that of a section, or of something in it."""
    return path[: len(section)] == section


def deepest(node: Node, path: KeyPath) -> tuple[Node, KeyPath]:
    """The node at a path, or the last one on the way there, and the rest of the path below it."""
    for depth in range(len(path), 0, -1):
        if (reached := at(node, path[:depth])) is not None:
            return reached, path[depth:]
    return node, path


def nearest(node: Node, path: KeyPath) -> Node:
    """The deepest node along a path: where a message about a missing value points."""
    return deepest(node, path)[0]


def key_mark(node: Node, path: KeyPath) -> Mark | None:
    """Where the last key of a path is written."""
    parent = at(node, path[:-1])
    if isinstance(parent, MappingNode) and path and path[-1] in parent.entries:
        return parent.entries[str(path[-1])].key
    return None


def with_value(tree: MappingNode, path: KeyPath, value: Node) -> MappingNode:
    """A copy of the tree with the node at an existing path replaced."""
    changed = _with_value(tree, path, value)
    assert isinstance(changed, MappingNode)
    return changed


def _with_value(node: Node, path: KeyPath, value: Node) -> Node:
    if not path:
        return value
    head, *rest = path

    def changed(key: str | int, child: Node) -> Node:
        return _with_value(child, tuple(rest), value) if key == head else child

    return with_children(node, changed)


def without(tree: MappingNode, path: KeyPath) -> MappingNode:
    """A copy of the tree without the node at a path; the tree itself if there is none."""
    if at(tree, path) is None:
        return tree
    *above, last = path
    section = at(tree, tuple(above))
    if isinstance(section, MappingNode):
        return with_value(tree, tuple(above), section.without_keys([str(last)]))
    assert isinstance(section, Listing)
    remaining = tuple(item for index, item in children(section) if index != last)
    return with_value(tree, tuple(above), replace(section, items=remaining))


def with_entry(node: Node | None, path: KeyPath, entry: Entry) -> MappingNode:
    """A copy of the tree with an entry at a path; missing sections on the way are created."""
    section = node if isinstance(node, MappingNode) else MappingNode({}, entry.key)
    key, rest = str(path[0]), path[1:]
    if rest:
        below = section.entries.get(key)
        entry = Entry(
            below.key if below else entry.key,
            with_entry(below.node if below else None, rest, entry),
        )
    return replace(section, entries={**section.entries, key: entry})


def leaves(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Every value of a recipe that was set as a whole: scalars, lists and empty mappings."""
    if not isinstance(node, MappingNode) or not node.entries:
        yield path, node
        return
    for key, child in children(node):
        yield from leaves(child, (*path, key))


def plain_leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The leaves of a recipe as plain values, without empty `args`."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from plain_leaves(item, (*path, key))
    elif path and not (value == {} and path[-1] == "args"):
        yield path, value


def nodes(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Every value with its path, sections and lists before their contents."""
    yield path, node
    for key, child in children(node):
        yield from nodes(child, (*path, key))


def dotted(path: KeyPath) -> str:
    """`models.actor.path`, and `graph.x.inputs[1]` for list items."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else (f".{key}" if text else key)
    return text


def kind_of(node: Node) -> str:
    """The word for a kind of value in messages."""
    if isinstance(node, MappingNode):
        return "a mapping"
    if isinstance(node, Listing):
        return "a list"
    match node.value:
        case None:
            return "null"
        case bool():
            return "bool"
        case int():
            return "int"
        case float():
            return "float"
    return "text"
