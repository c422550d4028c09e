"""Places in a recipe by pattern, such as `models.*.backend` where `*` is any name;
above all those of components."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlcli.recipe.parsing.tree import KeyPath, Node, keys_at

Pattern = tuple[str, ...]

GRAPHS: tuple[tuple[str, ...], ...] = (("graph",), ("train", "eval", "graph"))

COMPONENTS: tuple[tuple[Pattern, str], ...] = (
    (("datasets", "*"), "datasets"),
    (("models", "*", "backend"), "backends"),
    (("models", "*", "rollout", "backend"), "backends"),
    *(((*graph, "*", "interface"), "interfaces") for graph in GRAPHS),
)
"""Where a recipe names components, and of which kind."""

TYPED: tuple[Pattern, ...] = (("launch",), *(pattern for pattern, _ in COMPONENTS))
"""Sections that text alone can stand for, which is their type then: `backend: fsdp`."""


def matches(pattern: Pattern, path: KeyPath) -> bool:
    """Whether a path is one of those that a pattern describes."""
    return len(pattern) == len(path) and covers(pattern, path)


def covers(pattern: Pattern, path: KeyPath) -> bool:
    """Whether a path is one of those that a pattern describes, or leads to something below one."""
    return len(pattern) <= len(path) and all(
        want in ("*", key) for want, key in zip(pattern, path, strict=False)
    )


def leads_to(patterns: Iterable[Pattern], path: KeyPath) -> bool:
    """Whether any of the patterns describes a path, or one below it."""
    return any(matches(pattern[: len(path)], path) for pattern in patterns)


def kind_at(path: KeyPath) -> str | None:
    """The kind of component that a recipe names at a path."""
    return next((kind for pattern, kind in COMPONENTS if matches(pattern, path)), None)


def component_paths(tree: Node) -> Iterator[tuple[KeyPath, str]]:
    """The sections of components in a recipe, each with its kind."""
    for pattern, kind in COMPONENTS:
        paths: list[KeyPath] = [()]
        for wanted_key in pattern:
            paths = [
                (*path, key)
                for path in paths
                for key in keys_at(tree, path)
                if wanted_key in ("*", key)
            ]
        yield from ((path, kind) for path in paths)
