"""Locates the files that a recipe names, before any worker starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from rlcli import registry
from rlcli.errors import DataError, ModelError, ResourceError, RlcliError, raise_all
from rlcli.recipe.call_keys import calls_of
from rlcli.recipe.components import declared, has_method
from rlcli.recipe.parsing.layers import Layer
from rlcli.recipe.parsing.tree import Mapping, Mark, dotted, nearest
from rlcli.recipe.parsing.tree import Path as TreePath
from rlcli.recipe.schema import Call, Recipe

BUILTIN = "builtin:"
HUB = "hf:"
"""Prefix of the path of a Hub dataset; Hub models are written as owner/name only."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def with_found_files(recipe: Recipe, tree: Mapping, path: Path, layers: Sequence[Layer]) -> Recipe:
    """The recipe with its paths resolved for the working directory: looked up there, otherwise next to the layer
    that names them. Raises DataError, ModelError or ResourceError that lists all missing files."""
    finder = _Finder(tree, path, layers)
    data: Any = recipe.model_dump()
    missing: list[RlcliError] = []
    wanted = [(place, finder.file) for place in (*_dataset_files(recipe), *_interface_files(recipe))]
    wanted += [(place, finder.model_folder) for place in _model_folders(recipe)]
    wanted += [(place, finder.of_backend) for place in _backend_files(recipe)]
    for place, find in wanted:
        try:
            section = reduce(getitem, place[:-1], data)
            section[place[-1]] = find(place, section[place[-1]])
        except RlcliError as error:
            missing.append(error)
    raise_all(missing)
    return Recipe.model_validate(data)


def for_any_folder(recipe: Recipe) -> Recipe:
    """The same, for processes that may run in another folder: paths of found files are absolute."""
    data: Any = recipe.model_dump()
    named = (*_dataset_files(recipe), *_interface_files(recipe), *_model_folders(recipe), *_backend_files(recipe))
    for place in named:
        section = reduce(getitem, place[:-1], data)
        text = section[place[-1]]
        if not text.startswith((HUB, BUILTIN)) and Path(text).exists():
            section[place[-1]] = str(Path(text).absolute())
    return Recipe.model_validate(data)


def _dataset_files(recipe: Recipe) -> Iterator[TreePath]:
    for name, dataset in recipe.datasets.items():
        if isinstance(dataset.args.get("path"), str):
            yield ("datasets", name, "args", "path")
        scores = dataset.args.get("scores")
        if isinstance(scores, dict) and isinstance(scores.get("path"), str):
            yield ("datasets", name, "args", "scores", "path")


def _model_folders(recipe: Recipe) -> Iterator[TreePath]:
    for name, role in recipe.models.items():
        if role.path is not None and role.warm_start is None:
            yield ("models", name, "path")
        if role.tokenizer is not None:
            yield ("models", name, "tokenizer")
    for place, call in calls_of(recipe):
        if model_of_call(call) is not None:
            yield (*place, "interface", "args", "path")


def _interface_files(recipe: Recipe) -> Iterator[TreePath]:
    for place, call in calls_of(recipe):
        for name in _file_arguments(call):
            if isinstance(call.interface.args.get(name), str):
                yield (*place, "interface", "args", name)


def _backend_files(recipe: Recipe) -> Iterator[TreePath]:
    """Names without a folder are not looked up: they are commands, found through PATH."""
    for role, described in recipe.models.items():
        if (backend := described.backend) is not None:
            for name in declared("backends", backend.type, "FILES") or ():
                if isinstance(text := backend.args.get(name), str) and "/" in text:
                    yield ("models", role, "backend", "args", name)


def model_of_call(call: Call) -> str | None:
    """The model that an interface loads itself: its argument `path`, unless its class lists that in `FILES`."""
    path = call.interface.args.get("path")
    return path if isinstance(path, str) and "path" not in _file_arguments(call) else None


def _file_arguments(call: Call) -> Sequence[str]:
    names = declared("interfaces", call.interface.type, "FILES")
    return names if isinstance(names, tuple | list) else ()


class _Finder:
    def __init__(self, tree: Mapping, path: Path, layers: Sequence[Layer]):
        self.tree = tree
        self.path = path
        self.layers = layers

    def file(self, place: TreePath, text: str) -> str:
        if text.startswith(HUB):
            return text
        found = self.look(place, text)
        if found is None:
            what = f"{dotted(place)}: no such file: {text}"
            hint = f"{self.looked(place)}; a dataset of the Hub is written {HUB}owner/name"
            raise DataError(what, where=str(self.mark(place)), hint=hint, code="F81")
        if not Path(found).is_file() and not Path(found).is_dir():
            raise DataError(f"{dotted(place)}: {text} is not an ordinary file", where=str(self.mark(place)), code="F81")
        return found

    def model_folder(self, place: TreePath, text: str) -> str:
        where = str(self.mark(place))
        if text.startswith(BUILTIN):
            _check_builtin(text.removeprefix(BUILTIN), dotted(place), where)
            return text
        found = self.look(place, text)
        if found is not None:
            wanted = ("tokenizer.json", "tokenizer_config.json") if place[-1] == "tokenizer" else ("config.json",)
            if not any((Path(found) / name).is_file() for name in wanted):
                what = f"{dotted(place)}: {text} holds no {' or '.join(wanted)}"
                raise ModelError(what, where=where, hint="give the folder that save_pretrained wrote")
            return found
        if _HUB_ID.fullmatch(text):
            return text
        hint = f"{self.looked(place)}; a model on the Hub is written owner/name"
        raise ModelError(f"{dotted(place)}: no such folder: {text}", where=where, hint=hint)

    def of_backend(self, place: TreePath, text: str) -> str:
        found = self.look(place, text)
        if found is None:
            what = f"{dotted(place)}: there is no {text}"
            raise ResourceError(what, where=str(self.mark(place)), hint=self.looked(place))
        return found

    def look(self, place: TreePath, text: str) -> str | None:
        """The path relative to the working directory, or None. Links are not resolved: the Python of a virtual
        environment is one, and resolved it would be a different Python."""
        try:
            if Path(text).expanduser().exists():
                return str(Path(text).expanduser())
            beside = self.folder(place) / text
            return os.path.abspath(beside) if beside.exists() else None
        except (OSError, ValueError, RuntimeError):
            return None

    def looked(self, place: TreePath) -> str:
        return f"looked in the working directory and in {self.folder(place)}"

    def folder(self, place: TreePath) -> Path:
        """The folder of the layer that names the file."""
        file = self.mark(place).file
        return next((layer.path.parent for layer in self.layers if layer.file == file), self.path.parent)

    def mark(self, place: TreePath) -> Mark:
        return nearest(self.tree, place).mark


def _check_builtin(name: str, key: str, where: str) -> None:
    if has_method("datasets", name, "make_tokenizer"):
        return
    able = [dataset for dataset in registry.names("datasets") if has_method("datasets", dataset, "make_tokenizer")]
    hint = f"there is {', '.join(BUILTIN + dataset for dataset in able) or 'none'}"
    raise ModelError(f"{key}: no built-in tokenizer is named {name!r}", where=where, hint=hint)
