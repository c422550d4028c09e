"""Reports keys that a section does not have: misspelt, at another level, or of another tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcli.recipe.parsing.finding import whole_recipe_names
from rlcli.recipe.parsing.tree import (
    KeyPath,
    MappingNode,
    Mark,
    at,
    dotted,
    key_mark,
    leaves,
    nearest,
    nodes,
    value_at,
)
from rlcli.recipe.schema_types import annotation_at, fields_of, section_of
from rlcli.recipe.suggest import suggest_key
from rlcli.recipe.synonyms import called_here, translated
from rlcli.recipe.validation.argument_words import advice_on, argument_homes, key_as_argument
from rlcli.recipe.validation.checked_section import CheckedSection
from rlcli.recipe.validation.value_messages import rows_of
from rlcli.spelling import misspelt

TRAINED_ROLE = "actor"
"""The role that every built-in recipe trains."""


def foreign_keys(
    section: CheckedSection, by_path: Mapping[KeyPath, Sequence[Any]], tree: MappingNode
) -> dict[str, str]:
    """The keys of other tools, with ours for them, in a recipe that has no section of ours that
    is required, because it extends nothing; empty for any other recipe."""
    lacks = {
        path[0]
        for path, errors in by_path.items()
        if len(path) == 1 and errors[0]["type"] == "missing"
    }
    required = {name for name, field in section.model.model_fields.items() if field.is_required()}
    if section.prefix or "extends" in tree.entries or lacks != required - {"name"}:
        return {}
    unknown = [str(path[0]) for path in by_path if path[0] not in section.top]
    ours = {key: translated([key], section.words, [TRAINED_ROLE]) for key in unknown}
    return {key: name for key, name in ours.items() if name is not None}


def note_foreign(section: CheckedSection, ours: Mapping[str, str], tree: MappingNode) -> None:
    """Report a recipe in the words of another tool as one problem."""
    values = [value_at(tree, (key,)) for key in ours if ours[key] == "extends"]
    bases = [value for value in values if value in whole_recipe_names()]
    base = bases[0] if bases else "NAME (rlcli ls lists the recipes)"
    advice = [f"begin with extends: {base}"]
    advice += [f"write {name} instead of {key}" for key, name in ours.items() if name != "extends"]
    message = f"the recipe extends nothing and has another tool's keys: {', '.join(ours)}"
    mark = key_mark(tree, (next(iter(ours)),)) or tree.mark
    section.add("R42", message, (), mark, hint="; ".join(advice))


def note_unknown(section: CheckedSection, tree: MappingNode, path: KeyPath) -> None:
    """Report an unknown key; if a whole section of another framework was pasted, key by key."""
    if (advice := _advice(section, tree, path)) is not None:
        _note_key(section, advice[0], path, tree, advice[1])
        return
    key, legal = str(path[-1]), _legal_keys(section, path)
    homes = _written_homes(section, path, key_mark(tree, path))
    is_call = dotted(("graph", *path)) in homes
    meant = _meant_inside(section, tree, path)
    if any(meant.values()) and not is_call and misspelt(key, legal) is None:
        _note_pasted(section, tree, path, meant)
        return
    above = section.in_recipe(path)[:-1]
    code, hint = suggest_key(key, legal, section.words, above, section.roles, homes)
    _note_key(section, code, path, tree, hint)


def _advice(section: CheckedSection, tree: MappingNode, path: KeyPath) -> tuple[str, str] | None:
    """(message id, hint) for a key on which an interface has advice, that is several keys joined by
    dots, an argument written one level too high, or a block that is spelt out."""
    written, full_path, key = section.problems.written, section.in_recipe(path), str(path[-1])
    if (advice := advice_on(written, key)) is not None:
        return "R42", advice
    if (nested := _nested(key, _legal_keys(section, path))) is not None:
        return "R42", f"write {nested}; only the command line joins keys by dots"
    # the whole recipe also has the backends that no layer names
    if home := key_as_argument(written if section.prefix else tree, full_path[:-1], key):
        return "R43", f"did you mean {home}?"
    if (full_path[0], path[-1]) == ("datasets", "path"):
        text = value_at(tree, path) or "FILE"
        return "R43", f"to read a file: {rows_of(full_path[1], text)}"
    return _advice_on_block(section, tree, path)


def _advice_on_block(
    section: CheckedSection, tree: MappingNode, path: KeyPath
) -> tuple[str, str] | None:
    """The same for the block of a recipe in which references to it are spelt out."""
    if misspelt(str(path[-1]), _legal_keys(section, path)) is not None:
        return None
    homes = _homes_of_block(section, tree, path)
    return ("R42", f"set {', '.join(homes)}") if homes else None


def _nested(key: str, legal: list[str]) -> str | None:
    """How a file writes several keys joined by dots, if the first is legal."""
    first, *inner = key.split(".")
    if not inner or first not in legal:
        return None
    return "".join([first, *(f": {{{name}" for name in inner), ": …", "}" * len(inner)])


def _legal_keys(section: CheckedSection, path: KeyPath) -> list[str]:
    """The keys that may be where an unknown one is."""
    if len(path) == 1:
        return section.top
    model = section_of(annotation_at(section.model, path[:-1]))
    return list(fields_of(model)) if model else []


def _meant_inside(
    section: CheckedSection, tree: MappingNode, path: KeyPath
) -> dict[KeyPath, str | None]:
    """The keys inside an unknown section, with ours for those of another framework."""
    node, full_path = at(tree, path), section.in_recipe(path)
    inside = [inner for inner, _ in leaves(node) if inner] if isinstance(node, MappingNode) else []
    return {
        inner: translated(map(str, (*full_path, *inner)), section.words, section.roles)
        for inner in inside
    }


def _note_pasted(
    section: CheckedSection,
    tree: MappingNode,
    path: KeyPath,
    meant: Mapping[KeyPath, str | None],
) -> None:
    """Report each key of a section of another framework, with ours for it."""
    for inside, target in meant.items():
        advice = called_here(dotted((*path, *inside)[-2:]), target) if target else None
        _note_key(section, "R42", (*path, *inside), tree, advice)


def _homes_of_block(section: CheckedSection, tree: MappingNode, path: KeyPath) -> list[str]:
    """The keys of calls that have the arguments in an unknown section at the top, such as the block
    `ppo` in the recipe that a run has written down, where references to it are spelt out."""
    node, written = at(tree, path), section.problems.written
    if section.prefix or len(path) > 1 or not isinstance(node, MappingNode):
        return []
    homes: list[str] = []
    for argument, *inner in (map(str, keys) for keys, _ in leaves(node) if keys):
        of_calls = [home for home in argument_homes(written, argument) if home.startswith("graph.")]
        if not of_calls:
            return []
        homes += [dotted((home, *inner)) for home in of_calls]
    return homes


def _written_homes(section: CheckedSection, path: KeyPath, mark: Mark | None) -> list[str]:
    """Where else in the recipe a key of that name belongs to an interface, or is written: in a
    role, a call, or a block's argument. `mark`: the place of this one, from where a reference
    may have carried it."""
    written, here = section.problems.written, section.in_recipe(path)
    is_argument = section.prefix[-2:] == ("interface", "args")
    homes = argument_homes(written, str(path[-1])) if is_argument else []
    if homes:
        return homes
    namesakes = [home for home, _ in nodes(written) if home[-1:] == path[-1:] and home != here]
    others = [home for home in namesakes if mark is None or key_mark(written, home) != mark]
    in_sections = [home for home in others if len(home) > 1 and _is_of_mappings(home)]
    return [dotted(home) for home in sorted(in_sections, key=len)]


def _is_of_mappings(path: KeyPath) -> bool:
    """Whether a path does not lead through a list."""
    return all(isinstance(key, str) for key in path)


def _note_key(
    section: CheckedSection, code: str, path: KeyPath, tree: MappingNode, hint: str | None
) -> None:
    key = str(path[-1])
    mark = key_mark(tree, path) or nearest(tree, path).mark
    name = section.problems.name_at(mark, of_key=True) or dotted(section.in_recipe(path))
    details: dict[str, Any] = {"hint": hint, "width": len(key), "same": key}
    section.add(code, f"unknown key {name}", path if path[1:] else (), mark, **details)
