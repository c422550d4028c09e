"""The components that a recipe names, and their arguments, against the signatures in their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import cast

from pydantic import BaseModel

from rlcli import registry
from rlcli.errors import ProjectError, UnknownComponent
from rlcli.recipe.problems import Problems
from rlcli.recipe.tree import (
    DEFAULT,
    Entry,
    Mapping,
    Mark,
    Node,
    Path,
    Scalar,
    at,
    kind_of,
    plain,
    with_value,
)
from rlcli.recipe.validate import check_against

KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("datasets", "*"), "datasets"),
    (("models", "*", "backend"), "backends"),
    (("graph", "*", "interface"), "interfaces"),
    (("train", "eval", "graph", "*", "interface"), "interfaces"),
)
"""Where a recipe names components, and of which kind."""


def with_backends(tree: Mapping) -> Mapping:
    """Every role with the backend that it has by default, where no layer names one."""
    models = tree.get("models")
    for name in models.entries if isinstance(models, Mapping) else ():
        role = at(tree, ("models", name))
        if not isinstance(role, Mapping):
            continue
        given = role.get("backend") or Scalar(None, Mark(DEFAULT, 0, 0))
        if isinstance(given, Scalar) and given.value is None:
            given = Mapping({}, given.mark)
        if isinstance(given, Mapping) and "type" not in given.entries:
            mark = Mark(DEFAULT, 0, 0)
            kind = _default_backend(tree, name, role)
            typed = {"type": Entry(mark, Scalar(kind, mark, kind, plain=False))}
            backend = replace(given, entries={**typed, **given.entries})
            role = replace(role, entries={**role.entries, "backend": Entry(backend.mark, backend)})
            tree = cast(Mapping, with_value(tree, ("models", name), role))
    return tree


def _default_backend(tree: Mapping, name: str, role: Mapping) -> str:
    weights = (role.get(key) for key in ("path", "init", "scratch"))
    if all(node is None or (isinstance(node, Scalar) and node.value is None) for node in weights):
        return "null"
    graph = tree.get("graph")
    calls = [plain(entry.node) for entry in graph.entries.values()] if isinstance(graph, Mapping) else []
    trains = [call.get("model") for call in calls if isinstance(call, dict) and call.get("call") == "train_step"]
    return "fsdp" if name in trains else "inference"


def check_components(tree: Mapping, problems: Problems) -> tuple[Mapping, set[Path]]:
    """Check every named component. Returns the tree, with arguments as their types want them, and the paths
    of mappings that held unknown keys."""
    unknown_in: set[Path] = set()
    result: Node = tree
    for path, kind in _places(tree):
        node = at(result, path)
        if not isinstance(node, Mapping) or not isinstance(name := node.get("type"), Scalar):
            continue  # the schema says what is wrong
        if not isinstance(name.value, str):
            if name.text:  # `backend: null` names the backend of that name; so would a number
                result = with_value(result, (*path, "type"), Scalar(name.text, name.mark, name.text, plain=False))
            continue
        model = _model_of(kind, name, problems)
        args = node.get("args") or Mapping({}, name.mark)
        if model is None:
            continue
        if not isinstance(args, Mapping):
            problems.add("R37", f"args must be a mapping, found {kind_of(args)}", args.mark)
            continue
        checked = check_against(model, args, problems, prefix=(*path, "args"))
        unknown_in |= checked.unknown_in
        if node.get("args") is not None:
            result = with_value(result, (*path, "args"), checked.tree)
    assert isinstance(result, Mapping)
    return result, unknown_in


def _places(tree: Mapping) -> Iterator[tuple[Path, str]]:
    for pattern, kind in KINDS:
        paths: list[Path] = [()]
        for part in pattern:
            nodes = [(path, at(tree, path)) for path in paths]
            if part == "*":
                paths = [(*path, key) for path, node in nodes if isinstance(node, Mapping) for key in node.entries]
            else:
                paths = [(*path, part) for path, node in nodes if isinstance(node, Mapping) and part in node.entries]
        yield from ((path, kind) for path in paths)


def _model_of(kind: str, name: Scalar, problems: Problems) -> type[BaseModel] | None:
    try:
        return _arguments_of(kind, str(name.value))
    except UnknownComponent as error:
        problems.add("R70", error.what, name.mark, error.hint)
    except ProjectError as error:
        problems.add(error.code, f"{error.where}: {error.what}" if error.where else error.what, name.mark, error.hint)
    return None


@cache
def signature_of(kind: str, name: str) -> registry.Signature:
    """A component's signature, read once; `forget` drops what was read."""
    return registry.signature(kind, name)


@cache
def _arguments_of(kind: str, name: str) -> type[BaseModel]:
    return signature_of(kind, name).model()


def forget() -> None:
    """Read the components' files again from here on."""
    signature_of.cache_clear()
    _arguments_of.cache_clear()


def lacks_method(interface: str, method: str) -> bool:
    """Whether an interface is known not to have a method."""
    try:
        signature = signature_of("interfaces", interface)
    except (UnknownComponent, ProjectError):
        return False  # reported already
    return method not in signature.methods and not signature.has_unread_bases


def dataset_keys(dataset: str) -> tuple[str, ...] | None:
    """The keys that a dataset's rows bring: the tuple `KEYS` in its class; None if it does not say."""
    from rlcli.registry.source import read_module

    try:
        signature = signature_of("datasets", dataset)
    except (UnknownComponent, ProjectError):
        return None
    definition = read_module(f"rlcli.datasets.{signature.path.stem}", signature.path).classes.get(signature.class_name)
    for statement in definition.body if definition else ():
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == "KEYS" for target in targets):
            try:
                return tuple(ast.literal_eval(statement.value))  # type: ignore[attr-defined]
            except (ValueError, TypeError):
                return None
    return None
