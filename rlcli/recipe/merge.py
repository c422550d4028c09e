"""The laws by which a layer changes what lies below it.

Mappings merge key by key. Scalars and lists are replaced. A mapping with `_replace_: true` replaces
instead of merging; `{_append_: [...]}` adds to the list below. A component that changes its `type` starts its
`args` afresh, for they belong to the type. Where a component is expected, text alone names its type:
`launch: local`. `null` takes away what the layers below say (`rlcli.recipe.removal` has what is left then).
"""

from __future__ import annotations

from dataclasses import replace

from rlcli.recipe.problems import Problems
from rlcli.recipe.tree import COMMAND_LINE, Entry, Listing, Mapping, Node, Path, Scalar, kind_of

REPLACE = "_replace_"
APPEND = "_append_"

COMPONENT_PATHS: tuple[tuple[str, ...], ...] = (
    ("launch",),
    ("datasets", "*"),
    ("models", "*", "backend"),
    ("models", "*", "rollout", "backend"),
    ("graph", "*", "interface"),
    ("train", "eval", "graph", "*", "interface"),
)


def whole_reference(node: Node | None) -> str | None:
    """`a.b` if the value is nothing but `${a.b}`."""
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        return None
    text = node.value.strip()
    if text.startswith("${") and text.endswith("}") and "{" not in text[2:] and "}" not in text[2:-1]:
        return text[2:-1].strip()
    return None


def spell_out_types(node: Node, path: tuple[str, ...] = ()) -> Node:
    """Turn the shorthand `backend: fsdp` into `backend: {type: fsdp}` wherever a component is expected."""
    if isinstance(node, Scalar):
        short = isinstance(node.value, str) and not node.value.lstrip().startswith("${")
        if short and any(_matches(path, pattern) for pattern in COMPONENT_PATHS):
            return Mapping({"type": Entry(node.mark, node)}, node.mark)
        return node
    if isinstance(node, Mapping):
        leads = path == () or any(_matches(path, pattern[: len(path)]) for pattern in COMPONENT_PATHS)
        if leads:
            entries = {
                key: Entry(entry.key, spell_out_types(entry.node, (*path, key))) for key, entry in node.entries.items()
            }
            return replace(node, entries=entries)
    return node


def _matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    return len(path) == len(pattern) and all(want in ("*", part) for part, want in zip(path, pattern, strict=True))


def with_sound_markers(node: Node, problems: Problems, path: Path = ()) -> Node:
    """The tree, where every `_replace_` and `_append_` that cannot mean anything is noted and taken out."""
    if isinstance(node, Listing):
        items = (with_sound_markers(item, problems, (*path, index)) for index, item in enumerate(node.items))
        return replace(node, items=tuple(items))
    if not isinstance(node, Mapping):
        return node
    entries = dict(node.entries)
    for marker in (REPLACE, APPEND):
        entry = entries.get(marker)
        if entry is None:
            continue
        if not path or any(isinstance(part, int) for part in path):
            problems.add("R42", f"{marker} has no meaning here: nothing lies below to merge with", entry.key)
        elif marker == REPLACE and not (isinstance(entry.node, Scalar) and entry.node.value is True):
            problems.add("R37", f"{REPLACE} can only be true", entry.node.mark)
        elif marker == APPEND and (len(entries) > 1 or not isinstance(entry.node, Listing)):
            problems.add("R37", f"{APPEND} stands alone and holds a list: {{{APPEND}: [...]}}", entry.key)
            return Scalar(None, node.mark, sound=False)
        else:
            continue
        del entries[marker]
    return replace(
        node,
        entries={k: Entry(e.key, with_sound_markers(e.node, problems, (*path, k))) for k, e in entries.items()},
        sound=node.sound and len(entries) == len(node.entries),
    )


def merge(lower: Node | None, upper: Node, problems: Problems) -> Node:
    """What holds where `upper` is laid over `lower`. Markers must be sound (`with_sound_markers`)."""
    if isinstance(upper, Scalar) and upper.value is None and upper.sound:
        return replace(upper, over=lower.over if isinstance(lower, Scalar) and lower.value is None else lower)
    if not isinstance(upper, Mapping):
        return upper
    if APPEND in upper.entries:
        return _appended(lower, upper, problems)
    if REPLACE in upper.entries:
        lower = None
    entries: dict[str, Entry] = {}
    under, sound = upper.under, upper.sound
    if isinstance(lower, Mapping):
        entries.update(lower.entries)
        under, sound = under or lower.under, sound and lower.sound
        if _type_changes(lower, upper):
            entries.pop("args", None)
    elif whole_reference(lower) is not None:
        assert isinstance(lower, Scalar)
        under = lower
    for key, entry in upper.entries.items():
        if key != REPLACE:
            below = entries.get(key)
            entries[key] = Entry(entry.key, merge(below.node if below else None, entry.node, problems))
    overridden = upper.mark.file == COMMAND_LINE and isinstance(lower, Mapping)
    return Mapping(entries, lower.mark if overridden and lower else upper.mark, under, sound)


def _type_changes(lower: Mapping, upper: Mapping) -> bool:
    old, new = lower.get("type"), upper.get("type")
    return isinstance(old, Scalar) and isinstance(new, Scalar) and old.value != new.value


def _appended(lower: Node | None, upper: Mapping, problems: Problems) -> Node:
    more = upper.entries[APPEND].node
    assert isinstance(more, Listing)
    if lower is None or (isinstance(lower, Scalar) and lower.value is None):
        return more
    if not isinstance(lower, Listing):
        problems.add("R37", f"{APPEND} needs a list below; there is {kind_of(lower)} at {lower.mark}", upper.mark)
        return Scalar(None, upper.mark, sound=False)
    return Listing((*lower.items, *more.items), upper.mark)
