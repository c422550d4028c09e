"""The rules by which a layer changes the layers below it.

Mappings merge key by key. Scalars and lists are replaced. A mapping with `_replace_: true` replaces
instead of merging; `{_append_: [...]}` adds to the list below, or to the default
(`rlcli.recipe.parsing.defaults`). A component that changes its `type`
starts with empty `args`, because they belong to the type, unless they are a block, `args: ${ppo}`,
of which each component takes what it has: that remains, but nothing that was set on top of it.
Where a component is expected, a plain string names its type: `launch: local`. `null` removes what
the layers below say
(`rlcli.recipe.parsing.removal` describes what remains).
"""

from __future__ import annotations

from collections.abc import Mapping
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
    plain,
    unusable,
    with_children,
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


def as_layer(tree: MappingNode, problems: Problems) -> MappingNode:
    """A tree as it was written, ready to be merged: with valid markers, and components spelt
    out."""
    layer = spell_out_types(with_valid_markers(tree, problems))
    assert isinstance(layer, MappingNode)
    return layer


def spell_out_types(node: Node, path: tuple[str, ...] = ()) -> Node:
    """Turn the shorthand `backend: fsdp` into `backend: {type:
    fsdp}` wherever a component is expected."""
    if isinstance(node, Scalar):
        short = isinstance(node.value, str) and not node.value.lstrip().startswith("${")
        if short and any(matches(pattern, path) for pattern in TYPED):
            return MappingNode({"type": Entry(node.mark, node)}, node.mark)
        return node
    if isinstance(node, MappingNode) and leads_to(TYPED, path):
        return with_children(node, lambda key, child: spell_out_types(child, (*path, str(key))))
    return node


def with_valid_markers(node: Node, problems: Problems, path: KeyPath = ()) -> Node:
    """The tree, with every meaningless `_replace_` and `_append_` reported and removed."""
    if isinstance(node, MappingNode):
        entries = _valid_entries(node, problems, path)
        if entries is None:
            return unusable(node.mark)
        is_valid = node.valid and len(entries) == len(node.entries)
        node = replace(node, entries=entries, valid=is_valid)
    return with_children(node, lambda key, child: with_valid_markers(child, problems, (*path, key)))


def _valid_entries(node: MappingNode, problems: Problems, path: KeyPath) -> dict[str, Entry] | None:
    """The entries of a mapping without meaningless markers; None if no list can be appended."""
    entries = dict(node.entries)
    has_nothing_below = not path or any(isinstance(key, int) for key in path)
    for marker in (REPLACE, APPEND):
        if marker in entries and has_nothing_below:
            message = f"{marker} has no meaning here: there is nothing below to merge with"
            problems.add("R42", message, entries.pop(marker).key)
    if REPLACE in entries and plain(entries[REPLACE].node) is not True:
        problems.add("R37", f"{REPLACE} can only be true", entries.pop(REPLACE).node.mark)
    appended = entries.get(APPEND)
    if appended is not None and (len(entries) > 1 or not isinstance(appended.node, Listing)):
        message = f"{APPEND} must be the only key and hold a list: {{{APPEND}: [...]}}"
        problems.add("R37", message, appended.key)
        return None
    return entries


def merge(lower: Node | None, upper: Node, problems: Problems) -> Node:
    """The result of merging `upper` over `lower`. Markers must be valid (`with_valid_markers`)."""
    if is_null(upper) and upper.valid:
        return replace(upper, over=lower.over if is_null(lower) else lower)
    if not isinstance(upper, MappingNode):
        return upper
    if APPEND in upper.entries:
        return _appended(lower, upper, problems)
    if isinstance(lower, MappingNode) and REPLACE not in upper.entries:
        return _over_mapping(lower, upper, problems)
    replaces_all = REPLACE in upper.entries or whole_reference(lower) is None
    under = upper.under if replaces_all or not isinstance(lower, Scalar) else lower
    return replace(upper, entries=_over_entries({}, upper, problems), under=under)


def _over_mapping(lower: MappingNode, upper: MappingNode, problems: Problems) -> MappingNode:
    """Both, merged key by key. The command line does not move a section."""
    if upper.mark.file == COMMAND_LINE and lower.entries and not upper.entries and upper.valid:
        hint = f"KEY.NAME=null removes an entry, KEY={{{REPLACE}: true, …}} replaces all of them"
        problems.add("R42", "an empty mapping on top of others changes nothing", upper.mark, hint)
    if _type_changes(lower, upper):
        lower, upper = _without_args(lower), _over_other_type(lower, upper)
    return MappingNode(
        _over_entries(lower.entries, upper, problems),
        lower.mark if upper.mark.file == COMMAND_LINE else upper.mark,
        upper.under or lower.under,
        upper.valid and lower.valid,
    )


def _over_entries(
    lower: Mapping[str, Entry], upper: MappingNode, problems: Problems
) -> dict[str, Entry]:
    entries = dict(lower)
    for key, entry in upper.entries.items():
        if key != REPLACE:
            below = entries.get(key)
            node = merge(below.node if below else None, entry.node, problems)
            entries[key] = Entry(entry.key, node)
    return entries


def _type_changes(lower: MappingNode, upper: MappingNode) -> bool:
    old, new = lower.get("type"), upper.get("type")
    return isinstance(old, Scalar) and isinstance(new, Scalar) and old.value != new.value


def _without_args(component: MappingNode) -> MappingNode:
    """A component without the arguments of its type; those of a block, but not what is set on top
    of it, are for whichever components take them."""
    entries = dict(component.entries)
    args = entries.pop("args", None)
    if args is not None and reference_below(args.node) is not None:
        entries["args"] = replace(args, node=getattr(args.node, "under", args.node))
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
        return unusable(upper.mark)
    return Listing((*lower.items, *added.items), upper.mark)
