"""`key.path=value` on the command line: the topmost layer of a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlcli.recipe.parsing.layers import profile_names, recipe_names
from rlcli.recipe.parsing.merge import spell_out_types, with_valid_markers
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.reader import parse
from rlcli.recipe.parsing.scalars import ScalarError, core_scalar
from rlcli.recipe.parsing.tree import (
    COMMAND_LINE,
    Entry,
    KeyPath,
    MappingNode,
    Mark,
    Node,
    Scalar,
    dotted,
    leaves,
)
from rlcli.recipe.synonyms import translated

MAX_OVERRIDES = 1_000

_KEY = re.compile(r"[^\s.=\[\]{}:,]+(\.[^\s.=\[\]{}:,]+)*")


def parse_overrides(overrides: Sequence[str], problems: Problems) -> list[MappingNode]:
    """One small tree for each override. A value set twice is refused: the later one never wins
    silently. A value that cannot be read keeps its key,
    so that nothing is concluded from its absence."""
    problems.add_source(COMMAND_LINE, "\n".join(text.replace("\n", " ") for text in overrides))
    if len(overrides) > MAX_OVERRIDES:
        message = f"{len(overrides)} overrides; at most {MAX_OVERRIDES}"
        problems.add(
            "R10",
            message,
            Mark(COMMAND_LINE, MAX_OVERRIDES + 1, 1),
            "write a recipe that extends this one",
        )
        problems.is_cut_off = True
        return []
    if (joined := _written_with_spaces(overrides)) is not None:
        hint = f"write {joined}"
        problems.add("R41", "an override has no spaces around =", Mark(COMMAND_LINE, 1, 1), hint)
        problems.is_cut_off = True
        return []
    trees: list[MappingNode] = []
    set_by: dict[KeyPath, int] = {}
    for number, text in enumerate(overrides, start=1):
        tree = _parse(text, number, problems)
        if tree is None:
            continue
        problems_before = len(problems.reported)
        for path, node in leaves(tree):
            first = next((n for p, n in set_by.items() if _overlap(p, path)), None)
            if first is not None:
                both = f"{overrides[first - 1]!r}, then {text!r}"
                message = f"{dotted(path)} is set twice on the command line: {both}"
                problems.add("R05", message, node.mark, "keep one")
            set_by.setdefault(path, number)
        if len(problems.reported) == problems_before:
            trees.append(tree)
    return trees


def _written_with_spaces(overrides: Sequence[str]) -> str | None:
    """The first override as it should be, if it is spread over several words, as in `a = 1`."""
    for number, word in enumerate(overrides):
        before = "".join(overrides[:number][-1:])
        after = "".join(overrides[number + 1 :][:1])
        left = before if word.startswith("=") and "=" not in before else ""
        right = after if word.find("=") == len(word) - 1 and "=" not in after else ""
        if left or right:
            return f"{left}{word}{right}"
    return None


def _overlap(left: KeyPath, right: KeyPath) -> bool:
    length = min(len(left), len(right))
    return left[:length] == right[:length]


def _parse(text: str, number: int, problems: Problems) -> MappingNode | None:
    key, equals, value = text.partition("=")
    start = Mark(COMMAND_LINE, number, 1)
    if not equals:
        problems.add("R42", f"{text!r} is not an override", start, _instead(text))
        return None
    if not _KEY.fullmatch(key) or key[0] in "+~-":
        plain = key.lstrip("+~-")
        hint = "write key.path=value, with the keys joined by dots"
        if plain != key and _KEY.fullmatch(plain):
            hint = f"write {translated(plain.split('.')) or plain}={value[:40] or 'null'}"
        problems.add("R41", f"{key!r} is not a valid key", start, hint)
        return None
    mark = Mark(COMMAND_LINE, number, len(key) + 2)
    node = _value(value, mark, problems) or Scalar(None, mark, value, valid=False)
    parts = key.split(".")
    if parts[0] == "extends":
        problems.add("R42", "extends: cannot be set on the command line", start)
        return None
    column = len(key) + 1
    for name in reversed(parts):
        column -= len(name)
        mark = Mark(COMMAND_LINE, number, column)
        node = MappingNode({name: Entry(mark, node)}, mark)
        column -= 1
    spelt = spell_out_types(with_valid_markers(node, problems))
    assert isinstance(spelt, MappingNode)
    return spelt


def _instead(text: str) -> str:
    """What to write instead of a word that is not an override."""
    if text.endswith((".yaml", ".yml")):
        return f"to apply a recipe file on top: --with {text}"
    if text.startswith("~") and _KEY.fullmatch(text[1:]):
        return f"to remove a key: {text[1:]}=null"
    if text in profile_names():
        return f"to apply that profile on top: --with {text}"
    if text in recipe_names():
        return "a command takes one recipe; let one extend the other: rlcli cp"
    return "write key.path=value"


def _value(text: str, mark: Mark, problems: Problems) -> Node | None:
    """YAML flow forms and quotes if the value begins with one;
    otherwise all of it is one scalar."""
    problems_before = len(problems.reported)
    if text[:1] in ("[", "{", '"', "'"):
        node = parse(text, COMMAND_LINE, problems, first=mark)
        if isinstance(node, Scalar) and node.plain:
            node = Scalar(text, mark, text, plain=False)
    else:
        # Through the reader as a quoted string first: its rules on characters apply to the command
        # line too.
        quoted = parse(
            '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"',
            COMMAND_LINE,
            problems,
            first=mark,
        )
        if quoted is None:
            return None
        try:
            node = Scalar(core_scalar(text.strip()), mark, text.strip())
        except ScalarError as error:
            problems.add(error.code, str(error), mark)
    return node if len(problems.reported) == problems_before else None
