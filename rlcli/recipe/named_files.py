"""Locates the files that a recipe names, before any worker starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from rlcli import registry
from rlcli.api.run_folder import is_run, newest_run_in
from rlcli.errors import DataError, ModelError, ResourceError, RlcliError, raise_all
from rlcli.recipe.components import declared, has_method
from rlcli.recipe.graph import calls_of
from rlcli.recipe.parsing.finding import whole_recipe_names
from rlcli.recipe.parsing.layers import Layer
from rlcli.recipe.parsing.tree import KeyPath, MappingNode, Mark, dotted, nearest
from rlcli.recipe.schema import Call, Recipe
from rlcli.spelling import nearest_name

BUILTIN = "builtin:"
HUB = "hf:"
"""Prefix of the path of a Hub dataset; Hub models are written as owner/name only."""
_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
"""Endings of files that the names of datasets on the Hub do not have."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def with_found_files(
    recipe: Recipe, tree: MappingNode, path: Path, layers: Sequence[Layer]
) -> Recipe:
    """The recipe with its paths resolved for the working directory: looked up there, otherwise next
    to the layer that names them. Raises DataError, ModelError or ResourceError that lists all
    missing files."""
    finder = _Finder(tree, path, layers)
    data: Any = recipe.model_dump()
    missing: list[RlcliError] = []
    for tree_path, find in _named_files(recipe):
        section, key = reduce(getitem, tree_path[:-1], data), tree_path[-1]
        try:
            section[key] = find(finder, tree_path, section[key])
        except RlcliError as error:
            missing.append(error)
    raise_all(missing)
    return Recipe.model_validate(data)


def for_any_folder(recipe: Recipe) -> Recipe:
    """The same, for processes that may run in another folder: paths of found files are absolute."""
    data: Any = recipe.model_dump()
    for tree_path, _ in _named_files(recipe):
        section, key = reduce(getitem, tree_path[:-1], data), tree_path[-1]
        if not section[key].startswith((HUB, BUILTIN)) and Path(section[key]).exists():
            section[key] = str(Path(section[key]).absolute())
    return Recipe.model_validate(data)


# -- the files that a recipe names -----------------------------------------------------------------


def _named_files(recipe: Recipe) -> Iterator[tuple[KeyPath, Search]]:
    """The keys that name files, and how the file of each is searched."""
    for key in (*_dataset_files(recipe), *_interface_files(recipe)):
        yield key, _Finder.file
    for key in _model_folders(recipe):
        yield key, _Finder.model_folder
    for key in _backend_files(recipe):
        yield key, _Finder.of_backend
    if recipe.launch.slurm.template is not None:
        yield ("launch", "slurm", "template"), _Finder.of_job


def _dataset_files(recipe: Recipe) -> Iterator[KeyPath]:
    for name, dataset in recipe.datasets.items():
        if isinstance(dataset.args.get("path"), str):
            yield ("datasets", name, "args", "path")
        scores = dataset.args.get("scores")
        if isinstance(scores, dict) and isinstance(scores.get("path"), str):
            yield ("datasets", name, "args", "scores", "path")


def _model_folders(recipe: Recipe) -> Iterator[KeyPath]:
    for name, role in recipe.models.items():
        if role.path is not None and role.warm_start is None:
            yield ("models", name, "path")
        if role.tokenizer is not None:
            yield ("models", name, "tokenizer")
    for graph_path, call in calls_of(recipe):
        if model_of_call(call) is not None:
            yield (*graph_path, "interface", "args", "path")


def _interface_files(recipe: Recipe) -> Iterator[KeyPath]:
    for graph_path, call in calls_of(recipe):
        for name in _file_arguments(call):
            if isinstance(call.interface.args.get(name), str):
                yield (*graph_path, "interface", "args", name)


def _backend_files(recipe: Recipe) -> Iterator[KeyPath]:
    """Names without a folder are not looked up: they are commands, found through PATH."""
    for role, described in recipe.models.items():
        if (backend := described.backend) is not None:
            for name in declared("backends", backend.type, "FILES") or ():
                if isinstance(text := backend.args.get(name), str) and "/" in text:
                    yield ("models", role, "backend", "args", name)


def model_of_call(call: Call) -> str | None:
    """The model that an interface loads itself: its argument `path`,
    unless its class lists that in `FILES`."""
    path = call.interface.args.get("path")
    return path if isinstance(path, str) and "path" not in _file_arguments(call) else None


def _file_arguments(call: Call) -> Sequence[str]:
    names = declared("interfaces", call.interface.type, "FILES")
    return names if isinstance(names, tuple | list) else ()


# -- where they are --------------------------------------------------------------------------------


class _Finder:
    def __init__(self, tree: MappingNode, path: Path, layers: Sequence[Layer]):
        self.tree = tree
        self.path = path
        self.layers = layers

    def file(self, tree_path: KeyPath, text: str) -> str:
        if text.startswith(HUB):
            return text
        file = self.look(tree_path, text)
        if file is None:
            message = f"{dotted(tree_path)}: no such file: {text}"
            otherwise = self.looked(tree_path)
            if tree_path[0] == "datasets":
                otherwise += f"; a dataset of the Hub is written {HUB}owner/name"
            hint = _likely_data(tree_path, text) or otherwise
            raise DataError(message, where=str(self.mark(tree_path)), hint=hint, code="F81")
        if not Path(file).is_file() and not Path(file).is_dir():
            raise DataError(
                f"{dotted(tree_path)}: {text} is not an ordinary file",
                where=str(self.mark(tree_path)),
                code="F81",
            )
        return file

    def model_folder(self, tree_path: KeyPath, text: str) -> str:
        where = str(self.mark(tree_path))
        if text.startswith(BUILTIN):
            _check_builtin(text.removeprefix(BUILTIN), dotted(tree_path), where)
            return text
        folder = self.look(tree_path, text)
        if folder is not None:
            expected = (
                ("tokenizer.json", "tokenizer_config.json")
                if tree_path[-1] == "tokenizer"
                else ("config.json",)
            )
            if not any((Path(folder) / name).is_file() for name in expected):
                message = f"{dotted(tree_path)}: {text} holds no {' or '.join(expected)}"
                raise ModelError(message, where=where, hint=_model_below(Path(folder)))
            return folder
        if HUB_ID.fullmatch(text):
            return text
        hint = f"{self.looked(tree_path)}; a model on the Hub is written owner/name"
        if text in whole_recipe_names():
            hint = f"the result of the recipe {text} is written recipe:{text}#actor"
        raise ModelError(f"{dotted(tree_path)}: no such folder: {text}", where=where, hint=hint)

    def of_backend(self, tree_path: KeyPath, text: str) -> str:
        file = self.look(tree_path, text)
        if file is None:
            message = f"{dotted(tree_path)}: there is no {text}"
            raise ResourceError(
                message, where=str(self.mark(tree_path)), hint=self.looked(tree_path)
            )
        return file

    def of_job(self, tree_path: KeyPath, text: str) -> str:
        """One that is missing is reported when a job is submitted: a run that has begun, and is
        looked at or continued, does not need it."""
        return self.look(tree_path, text) or text

    def look(self, tree_path: KeyPath, text: str) -> str | None:
        """The path relative to the working directory, or None. Links are not resolved: the Python
        of a virtual environment is one, and resolved it would be a different Python."""
        try:
            if Path(text).expanduser().exists():
                return str(Path(text).expanduser())
            beside = self.folder(tree_path) / text
            return os.path.abspath(beside) if beside.exists() else None
        except (OSError, ValueError, RuntimeError):
            return None

    def looked(self, tree_path: KeyPath) -> str:
        return f"looked in the working directory and in {self.folder(tree_path)}"

    def folder(self, tree_path: KeyPath) -> Path:
        """The folder of the layer that names the file."""
        file = self.mark(tree_path).file
        return next(
            (layer.path.parent for layer in self.layers if layer.file == file), self.path.parent
        )

    def mark(self, tree_path: KeyPath) -> Mark:
        return nearest(self.tree, tree_path).mark


Search = Callable[[_Finder, KeyPath, str], str]
"""Finds the file of a key by the text that is written there."""


def _model_below(folder: Path) -> str:
    """The hint for a folder that is not a model's: the model in it, if it is a run's or of runs."""
    run = folder if is_run(folder) else newest_run_in(folder)
    models = sorted(run.glob("models/*/config.json")) if run is not None else []
    if models:
        return f"the model of the run {run} is in {models[0].parent}"
    return "give the folder that save_pretrained wrote"


def _likely_data(tree_path: KeyPath, text: str) -> str | None:
    """What was probably meant by the name of a file that does not exist."""
    if text in registry.names("datasets"):
        return f"{text} is a dataset: {dotted(tree_path[:2])}={text}"
    if re.search(r"[*?[]", text):
        return "patterns are not expanded: name one file, or the folder that holds them"
    try:
        file = Path(text).expanduser()
        neighbours = [neighbour.name for neighbour in file.parent.iterdir()]
    except OSError:
        neighbours = []
    except (ValueError, RuntimeError):  # no possible path, no such home
        return None
    near = nearest_name(file.name, neighbours)
    if near is not None:
        return f"did you mean {file.with_name(near)}?"
    is_hub_id = HUB_ID.fullmatch(text) and file.suffix not in _SUFFIXES
    if is_hub_id and not file.parent.is_dir():
        return f"on the Hub it is written {HUB}{text}"
    return None


def _check_builtin(name: str, key: str, where: str) -> None:
    if has_method("datasets", name, "make_tokenizer"):
        return
    able = [
        dataset
        for dataset in registry.names("datasets")
        if has_method("datasets", dataset, "make_tokenizer")
    ]
    hint = f"there is {', '.join(BUILTIN + dataset for dataset in able) or 'none'}"
    raise ModelError(f"{key}: no built-in tokenizer is named {name!r}", where=where, hint=hint)
