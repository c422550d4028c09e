"""The rules by which a layer changes the layers below it.

Mappings merge key by key. Scalars and lists are replaced. A mapping with `_replace_: true` replaces
instead of merging; `{_append_: [...]}` adds to the list below. A component that changes its `type`
starts with empty `args`, because they belong to the type, unless they are a block, `args: ${ppo}`,
of which each component takes what it has. Where a component is expected, a plain string names its
type: `launch: local`. `null` removes what the layers below say
(`rlcli.recipe.parsing.removal` describes what remains).
"""

from __future__ import annotations

from dataclasses import replace

from rlcli.recipe.parsing.places import TYPED, leads_to, matches
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import (
    COMMAND_LINE,
    Entry,
    KeyPath,
    Listing,
    MappingNode,
    Node,
    Scalar,
    is_null,
    kind_of,
)

REPLACE = "_replace_"
APPEND = "_append_"


def whole_reference(node: Node | None) -> str | None:
    """`a.b` if the value is only `${a.b}`."""
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        return None
    text = node.value.strip()
    if (
        text.startswith("${")
        and text.endswith("}")
        and "{" not in text[2:]
        and "}" not in text[2:-1]
    ):
        return text[2:-1].strip()
    return None


def reference_below(node: Node | None) -> str | None:
    """`a.b` if the value is only `${a.b}`, or entries set on top of that."""
    return whole_reference(node.under if isinstance(node, MappingNode) else node)


def spell_out_types(node: Node, path: tuple[str, ...] = ()) -> Node:
    """Turn the shorthand `backend: fsdp` into `backend: {type:
    fsdp}` wherever a component is expected."""
    if isinstance(node, Scalar):
        short = isinstance(node.value, str) and not node.value.lstrip().startswith("${")
        if short and any(matches(pattern, path) for pattern in TYPED):
            return MappingNode({"type": Entry(node.mark, node)}, node.mark)
        return node
    if isinstance(node, MappingNode) and leads_to(TYPED, path):
        entries = {
            key: Entry(entry.key, spell_out_types(entry.node, (*path, key)))
            for key, entry in node.entries.items()
        }
        return replace(node, entries=entries)
    return node


def with_valid_markers(node: Node, problems: Problems, path: KeyPath = ()) -> Node:
    """The tree, with every meaningless `_replace_` and `_append_` reported and removed."""
    if isinstance(node, Listing):
        items = (
            with_valid_markers(item, problems, (*path, index))
            for index, item in enumerate(node.items)
        )
        return replace(node, items=tuple(items))
    if not isinstance(node, MappingNode):
        return node
    entries = dict(node.entries)
    for marker in (REPLACE, APPEND):
        entry = entries.get(marker)
        if entry is None:
            continue
        if not path or any(isinstance(key, int) for key in path):
            problems.add(
                "R42",
                f"{marker} has no meaning here: there is nothing below to merge with",
                entry.key,
            )
        elif marker == REPLACE and not (
            isinstance(entry.node, Scalar) and entry.node.value is True
        ):
            problems.add("R37", f"{REPLACE} can only be true", entry.node.mark)
        elif marker == APPEND and (len(entries) > 1 or not isinstance(entry.node, Listing)):
            problems.add(
                "R37",
                f"{APPEND} must be the only key and hold a list: {{{APPEND}: [...]}}",
                entry.key,
            )
            return Scalar(None, node.mark, valid=False)
        else:
            continue
        del entries[marker]
    return replace(
        node,
        entries={
            k: Entry(e.key, with_valid_markers(e.node, problems, (*path, k)))
            for k, e in entries.items()
        },
        valid=node.valid and len(entries) == len(node.entries),
    )


def merge(lower: Node | None, upper: Node, problems: Problems) -> Node:
    """The result of merging `upper` over `lower`. Markers must be valid (`with_valid_markers`)."""
    if isinstance(upper, Scalar) and upper.value is None and upper.valid:
        return replace(
            upper, over=lower.over if isinstance(lower, Scalar) and lower.value is None else lower
        )
    if not isinstance(upper, MappingNode):
        return upper
    if APPEND in upper.entries:
        return _appended(lower, upper, problems)
    if REPLACE in upper.entries:
        lower = None
    entries: dict[str, Entry] = {}
    under, valid = upper.under, upper.valid
    if isinstance(lower, MappingNode):
        under, valid = under or lower.under, valid and lower.valid
        if _type_changes(lower, upper):
            lower, upper = _without_args(lower), _over_other_type(lower, upper)
        entries.update(lower.entries)
    elif whole_reference(lower) is not None:
        assert isinstance(lower, Scalar)
        under = lower
    for key, entry in upper.entries.items():
        if key != REPLACE:
            below = entries.get(key)
            entries[key] = Entry(
                entry.key, merge(below.node if below else None, entry.node, problems)
            )
    overridden = upper.mark.file == COMMAND_LINE and isinstance(lower, MappingNode)
    return MappingNode(entries, lower.mark if overridden and lower else upper.mark, under, valid)


def _type_changes(lower: MappingNode, upper: MappingNode) -> bool:
    old, new = lower.get("type"), upper.get("type")
    return isinstance(old, Scalar) and isinstance(new, Scalar) and old.value != new.value


def _without_args(component: MappingNode) -> MappingNode:
    """A component without the arguments of its type; those of a block are for whichever components
    take them."""
    entries = dict(component.entries)
    if whole_reference(component.get("args")) is None:
        entries.pop("args", None)
    return replace(component, entries=entries)


def _over_other_type(lower: MappingNode, upper: MappingNode) -> MappingNode:
    """A component that remembers the type which its own replaces."""
    entry, replaced = upper.entries["type"], lower.get("type")
    assert isinstance(entry.node, Scalar)
    remembering = Entry(entry.key, replace(entry.node, over=replaced))
    return replace(upper, entries={**upper.entries, "type": remembering})


def _appended(lower: Node | None, upper: MappingNode, problems: Problems) -> Node:
    added = upper.entries[APPEND].node
    assert isinstance(added, Listing)
    if lower is None or is_null(lower):
        return added
    if not isinstance(lower, Listing):
        problems.add(
            "R37",
            f"{APPEND} needs a list below; there is {kind_of(lower)} at {lower.mark}",
            upper.mark,
        )
        return Scalar(None, upper.mark, valid=False)
    return Listing((*lower.items, *added.items), upper.mark)
