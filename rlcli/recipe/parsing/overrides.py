"""`key.path=value` on the command line: the topmost layer of a recipe."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from rlcli.recipe.parsing.finding import profile_names, recipe_names
from rlcli.recipe.parsing.merge import REPLACE, as_layer
from rlcli.recipe.parsing.places import kind_at
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
    unusable,
)
from rlcli.recipe.synonyms import translated

MAX_OVERRIDES = 1_000

_KEY = re.compile(r"[^\s.=\[\]{}:,]+(\.[^\s.=\[\]{}:,]+)*")


def parse_overrides(overrides: Sequence[str], problems: Problems) -> list[MappingNode]:
    """One small tree for each override. A value set twice is refused: the later one never wins
    silently, and their order means nothing. A value that cannot be read keeps its key,
    so that nothing is concluded from its absence."""
    problems.add_source(COMMAND_LINE, "\n".join(text.replace("\n", " ") for text in overrides))
    if _are_refused(overrides, problems):
        problems.is_cut_off = True
        return []
    trees: list[MappingNode] = []
    set_by: dict[KeyPath, int] = {}
    for number, text in enumerate(overrides, start=1):
        tree = _parse(text, number, problems)
        if tree is None:
            continue
        repeats = list(_repeats(tree, set_by))
        for first, path, node in repeats:
            both = f"{overrides[first - 1]!r}, then {text!r}"
            message = f"{dotted(path)} is set twice on the command line: {both}"
            problems.add("R05", message, node.mark, "keep one")
        set_by |= {path: set_by.get(path, number) for path, _ in leaves(tree)}
        if not repeats:
            trees.append(tree)
    return sorted(trees, key=_drops_below)


def _drops_below(tree: MappingNode) -> tuple[float, bool]:
    """The depth from which an override drops what is below, and whether that is only arguments: the
    outermost is merged first, so that none drops what another override sets."""
    dropping = (
        (len(path), path[-1] != REPLACE)
        for path, _ in leaves(tree)
        if path[-1] == REPLACE or (path[-1] == "type" and kind_at(path[:-1]))
    )
    return min(dropping, default=(math.inf, True))


def _repeats(
    tree: MappingNode, set_by: Mapping[KeyPath, int]
) -> Iterator[tuple[int, KeyPath, Node]]:
    """(number of the override that set it, key, value) of what was set before."""
    for path, node in leaves(tree):
        for earlier, number in set_by.items():
            if _overlap(earlier, path):
                yield number, path, node
                break


def _are_refused(overrides: Sequence[str], problems: Problems) -> bool:
    """Whether there are too many, or words that belong together; reports it."""
    if len(overrides) > MAX_OVERRIDES:
        message = f"{len(overrides)} overrides; at most {MAX_OVERRIDES}"
        mark = Mark(COMMAND_LINE, MAX_OVERRIDES + 1, 1)
        problems.add("R10", message, mark, "write a recipe that extends this one")
        return True
    for message, find in _SPREAD.items():
        for number, joined in find(overrides):
            mark = Mark(COMMAND_LINE, number, 1)
            problems.add("R41", message, mark, f"write {joined}")
            return True
    return False


def _with_spaces(overrides: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(number, the override as it should be) of those spread over words, as in `a = 1`."""
    for number, word in enumerate(overrides):
        before = "".join(overrides[:number][-1:])
        after = "".join(overrides[number + 1 :][:1])
        left = before if word.startswith("=") and "=" not in before else ""
        right = after if word.find("=") == len(word) - 1 and "=" not in after else ""
        if left or right:
            yield number + (not left), f"{left}{word}{right}"


def _without_quotes(overrides: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The same for lists and mappings, as in `mesh={dp: 2}`."""
    for number, word in enumerate(overrides, start=1):
        opening = word.partition("=")[2][:1]
        if opening not in ("[", "{"):
            continue
        closing = "]" if opening == "[" else "}"
        words = [word, *takewhile(lambda word: "=" not in word, overrides[number:])]
        texts = [" ".join(words[:end]) for end in range(1, len(words) + 1)]
        balanced = (text for text in texts if text.count(opening) <= text.count(closing))
        if (value := next(balanced, word)) != word:
            yield number, shlex.quote(value)


_SPREAD = {
    "an override has no spaces around =": _with_spaces,
    "a value with spaces must be in quotes, or the shell splits it": _without_quotes,
}
"""Message → what finds the overrides that the shell has passed on as several words."""


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
        problems.add("R41", f"{key!r} is not a valid key", start, _with_valid_key(key, value))
        return None
    mark = Mark(COMMAND_LINE, number, len(key) + 2)
    node = _value(value, mark, problems) or unusable(mark, value)
    names = key.split(".")
    if names[0] == "extends":
        problems.add("R42", "extends: cannot be set on the command line", start)
        return None
    return as_layer(_nested(names, node, number), problems)


def _with_valid_key(key: str, value: str) -> str:
    """How to write an override whose key is invalid."""
    plain = key.lstrip("+~-")
    if plain != key and _KEY.fullmatch(plain):
        return f"write {translated(plain.split('.')) or plain}={value[:40] or 'null'}"
    return "write key.path=value, with the keys joined by dots"


def _nested(names: Sequence[str], node: Node, number: int) -> MappingNode:
    """Mappings around a value, one for each name; they begin where the names do."""
    column = len(".".join(names)) + 1
    for name in reversed(names):
        column -= len(name)
        mark = Mark(COMMAND_LINE, number, column)
        node = MappingNode({name: Entry(mark, node)}, mark)
        column -= 1
    assert isinstance(node, MappingNode)
    return node


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
