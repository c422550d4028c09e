"""`${a.b}` and `${env:NAME}`: a value taken from elsewhere in the recipe or from the environment.

If no layer sets `a.b`, its default in the schema is used; defaults of components are not looked up.
A value that is only a reference becomes the whole target, even a mapping, and each leaf keeps its
origin. Within other text the target's text is inserted. `$${` stands for a literal `${`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlcli.recipe.parsing.defaults import default_at
from rlcli.recipe.parsing.merge import merge, whole_reference
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.reader import MAX_DEPTH, MAX_NODES, MAX_TEXT
from rlcli.recipe.parsing.removal import is_entry, null_means, place_of, removed_at
from rlcli.recipe.parsing.scalars import ScalarError, core_scalar
from rlcli.recipe.parsing.tree import (
    KeyPath,
    MappingNode,
    Mark,
    Node,
    Scalar,
    is_null,
    keys_at,
    kind_of,
    nodes,
    unusable,
    with_children,
)
from rlcli.recipe.schema import Recipe
from rlcli.spelling import did_you_mean

MAX_TEXT_IN_ALL = 4 * 1024 * 1024
MAX_HOPS = 64

_TOKEN = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_KEYS = re.compile(r"[^\s.{}$:]+(\.[^\s.{}$:]+)*")
_VARIABLE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_SECRET = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASS(W|P|_|$)|PRIVATE|CREDENTIAL|API_?KEY|ACCESS_?KEY|_PWD$"
    r"|(^|_)(KEY|AUTH(ORIZATION)?|BEARER|COOKIE|DSN|PAT)$",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Whether a variable, a key (`X-Api-Key`, `judge.key`) or an option of this name holds a
    secret, as far as its name says."""
    return _SECRET.search(re.sub("[-.]", "_", name)) is not None


@dataclass(frozen=True)
class Reference:
    """A `${a.b}` in a recipe."""

    path: KeyPath
    """The key whose value contains it."""
    target: KeyPath
    """`("a", "b")`."""
    is_alone: bool
    """Whether the value is only the reference, so that it may bring in whole sections."""


def referenced_blocks(node: Node) -> set[str]:
    """The top-level names that some `${name...}` refers to, or did before a null removed it."""
    scalars = [scalar for _, scalar in nodes(node) if isinstance(scalar, Scalar)]
    removed = [scalar.over for scalar in scalars if scalar.over is not None]
    blocks = {str(reference.target[0]) for reference in references_in(node)}
    return blocks.union(*map(referenced_blocks, removed))


def references_in(tree: Node) -> Iterator[Reference]:
    """Every reference in a tree with unresolved references."""
    for path, node in nodes(tree):
        scalar = node.under if isinstance(node, MappingNode) else node
        if isinstance(scalar, Scalar) and isinstance(scalar.value, str) and "${" in scalar.value:
            is_alone = whole_reference(scalar) is not None
            for match in _TOKEN.finditer(scalar.value):
                if match.group(1) is not None:
                    yield Reference(path, tuple(match.group(1).strip().split(".")), is_alone)


def interpolate(
    root: MappingNode, problems: Problems, environment: Mapping[str, str]
) -> MappingNode:
    """The tree with all references resolved; unresolvable ones are reported,
    and their values are not `valid`."""
    resolved = _Interpolator(root, problems, environment).value(root, 0)
    assert isinstance(resolved, MappingNode)
    return resolved


class _Interpolator:
    def __init__(self, root: MappingNode, problems: Problems, environment: Mapping[str, str]):
        self.root = root
        self.problems = problems
        self.environment = environment
        self.resolved: dict[str, Node] = {}
        self.open: list[str] = []
        self.nodes = 0
        self.characters = 0
        self.too_large = False

    def value(self, node: Node, depth: int) -> Node:
        """The node with all references below it resolved."""
        self.nodes += 1
        if self.exceeds_limits(node.mark, depth):
            return unusable(node.mark)
        if isinstance(node, MappingNode):
            node = self.over_reference(node, depth)
        if not isinstance(node, Scalar):
            return with_children(node, lambda _, child: self.value(child, depth + 1))
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        reference = whole_reference(node)
        if reference is not None and not node.value.startswith("$$"):
            target = self.target(reference, node.mark, depth)
            # each copy counts
            return target if isinstance(target, Scalar) else self.value(target, depth)
        return self.text(node, depth)

    def exceeds_limits(self, mark: Mark, depth: int) -> bool:
        """Whether the resolved recipe is too large, which is reported once."""
        limit = None
        if depth > MAX_DEPTH:
            limit = f"nests deeper than {MAX_DEPTH}"
        elif self.nodes > MAX_NODES:
            limit = f"holds more than {MAX_NODES} values"
        if limit is not None and not self.too_large:
            message = f"with its references resolved the recipe {limit}"
            self.problems.add("R65", message, mark)
            self.too_large = self.problems.is_cut_off = True
        return self.too_large

    def over_reference(self, node: MappingNode, depth: int) -> MappingNode:
        """Entries set on top of `${a.b}`, merged with its target."""
        if node.under is None:
            return node
        reference = whole_reference(node.under)
        assert reference is not None
        below = self.target(reference, node.under.mark, depth)
        lacks = isinstance(below, Scalar) and not below.valid
        merged = merge(
            below, replace(node, under=None, valid=node.valid and not lacks), self.problems
        )
        assert isinstance(merged, MappingNode)
        return merged

    def target(self, reference: str, mark: Mark, depth: int) -> Node:
        """The resolved target of `${reference}`."""
        if variable := _VARIABLE.fullmatch(reference):
            return self.variable(variable[1], mark)
        if reference in self.resolved:
            return self.resolved[reference]
        if refusal := self.refusal(reference):
            code, message, hint = refusal
            self.problems.add(code, message, mark, hint)
            return unusable(mark)
        self.open.append(reference)
        target = self.find(reference, mark, depth)
        result = unusable(mark) if target is None else self.value(target, depth)
        self.open.pop()
        self.resolved[reference] = result
        return result

    def refusal(self, reference: str) -> tuple[str, str, str | None] | None:
        """(message id, message, hint), if `${reference}` cannot be followed."""
        if not _KEYS.fullmatch(reference):
            hint = "nesting and defaults (:-) are not supported"
            return "R63", f"${{{reference}}} is not a valid reference", hint
        if reference in self.open:
            circle = " → ".join([*self.open[self.open.index(reference) :], reference])
            return "R64", f"circular reference: {circle}", None
        if len(self.open) >= MAX_HOPS:
            return "R65", f"more than {MAX_HOPS} references in one chain", None
        return None

    def find(self, reference: str, mark: Mark, depth: int) -> Node | None:
        node: Node = self.root
        path = tuple(reference.split("."))
        for walked, key in enumerate(path):
            here = path[: walked + 1]
            node = self.followed(node, depth)
            child = node.get(key) if isinstance(node, MappingNode) else None
            meaning = null_means(Recipe, here) if is_null(child) and child.valid else "value"
            if child is not None and meaning == "gone":
                message = f"${{{reference}}}: {'.'.join(here)} is removed {place_of(child.mark)}"
                self.problems.add("R61", message, mark, self.removal_of(mark), section=here)
                return None
            if child is None or meaning == "default":
                return self.default(reference, here, node, mark)
            node = child
        return node

    def removal_of(self, mark: Mark) -> str | None:
        """How to remove the role, dataset or call that is written as a reference at a place."""
        key = self.problems.name_at(mark)
        return f"remove {key} too: {key}=null" if key and is_entry((*key.split("."),)) else None

    def followed(self, node: Node, depth: int) -> Node:
        """A node, or what it refers to."""
        if (through := whole_reference(node)) is not None:
            node = self.target(through, node.mark, depth)
        return self.over_reference(node, depth) if isinstance(node, MappingNode) else node

    def default(
        self, reference: str, path: tuple[str, ...], holder: Node, mark: Mark
    ) -> Node | None:
        """The default of what a reference leads to, below a key that no layer sets; None, with the
        reason reported, if there is none."""
        if isinstance(holder, MappingNode) and not holder.valid:
            return None
        default = default_at(tuple(reference.split(".")), len(path) - 1)
        if default is None:
            self.nothing_there(reference, path, mark)
        return default

    def nothing_there(self, reference: str, path: tuple[str, ...], mark: Mark) -> None:
        *walked, key = path
        location = f"under {'.'.join(walked)}" if walked else "at the top level"
        hint = did_you_mean(key, keys_at(self.root, tuple(walked)))
        if removed := removed_at(self.root, tuple(walked)):
            hint = f"{'.'.join(walked)} is removed {place_of(removed)}"
        elif "args" in walked:
            hint = hint or "a component's defaults cannot be referred to; write the value out"
        self.problems.add(
            "R61", f"${{{reference}}}: nothing is set at {key} {location}", mark, hint
        )

    def variable(self, name: str, mark: Mark) -> Node:
        value = self.environment.get(name)
        if is_secret_name(name):
            message = f"{name} looks like a secret; recipes are copied into run directories"
            self.problems.add(
                "R62",
                message,
                mark,
                "programs that need it read it from the environment themselves",
            )
        elif not value:
            state = "is not set" if value is None else "is empty"
            self.problems.add("R62", f"the environment variable {name} {state}", mark)
        elif len(value) > MAX_TEXT or not value.isprintable():
            self.problems.add("R62", f"the environment variable {name} holds no plain text", mark)
        else:
            return _value_of_variable(value, mark)
        return unusable(mark)

    def text(self, node: Scalar, depth: int) -> Scalar:
        """Text with references inside."""
        assert isinstance(node.value, str)
        parts: list[str] = []
        length = end = 0
        for match in _TOKEN.finditer(node.value):
            replacement = self.replacement(match, node.mark, depth)
            if replacement is None:
                return unusable(node.mark)
            parts += [node.value[end : match.start()], replacement]
            end = match.end()
            length += len(parts[-1]) + len(parts[-2])
            self.characters += len(replacement)
            if length > MAX_TEXT or self.characters > MAX_TEXT_IN_ALL:
                self.problems.add(
                    "R65", "with its references resolved, the text is longer than 64 KiB", node.mark
                )
                return unusable(node.mark)
        parts.append(node.value[end:])
        return Scalar("".join(parts), node.mark, "".join(parts), plain=False)

    def replacement(self, match: re.Match[str], mark: Mark, depth: int) -> str | None:
        """The text for one reference; None, with the reason reported, if there is none."""
        if match.group() == "$${":
            return "${"
        if match.group(1) is None:
            hint = "nesting is not supported; write $${ for a literal ${"
            self.problems.add("R63", "${ without its closing brace", mark, hint)
            return None
        target = self.target(match.group(1).strip(), mark, depth)
        if isinstance(target, Scalar) and not target.valid:
            return None
        if not isinstance(target, Scalar) or target.value is None:
            self.problems.add(
                "R37",
                f"{match.group()} is {kind_of(target)}, which cannot be part of a text",
                mark,
            )
            return None
        return target.text if target.plain else str(target.value)


def _value_of_variable(text: str, mark: Mark) -> Scalar:
    """A number or a boolean as in a recipe; anything else is text,
    also what a recipe would read as null."""
    try:
        value = core_scalar(text)
    except ScalarError:
        value = None
    return Scalar(text, mark, text, plain=False) if value is None else Scalar(value, mark, text)
