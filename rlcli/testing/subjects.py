"""What can be tested: every component and recipe by kind and name, with its file,
contract and own tests."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rlcli import registry
from rlcli.api.component import module_name
from rlcli.errors import RecipeError, RlcliError, UnknownComponent, UsageError
from rlcli.project import FOLDERS as OF_PROJECT
from rlcli.project import PACKAGE, current_project, is_project, search_path, search_paths_kept
from rlcli.spelling import nearest_name
from rlcli.testing.own_tests import files_about, helpers_of


@dataclass(frozen=True)
class SubjectKind:
    """A kind of subject with a contract."""

    module: str
    """Module with its contract class."""
    contract: str
    runs_on: str
    """What its checks run on, for the report."""
    part_of: str = ""
    """The kind whose contract includes these checks."""


KINDS: Mapping[str, SubjectKind] = {
    "interface": SubjectKind("rlcli.testing.interface", "InterfaceContract", "CPU, tiny model"),
    "backend": SubjectKind("rlcli.testing.backend", "BackendContract", "CPU, tiny model"),
    "dataset": SubjectKind("rlcli.testing.dataset", "DatasetContract", "CPU, tiny tokenizer"),
    "environment": SubjectKind("rlcli.testing.environment", "EnvironmentContract", "CPU, no model"),
    "family": SubjectKind("rlcli.testing.family", "FamilyContract", "CPU, tiny model"),
    "recipe": SubjectKind("rlcli.testing.recipe", "RecipeContract", "CPU, tiny models, two steps"),
    "reward": SubjectKind(
        "rlcli.testing.interface.reward", "RewardChecks", "CPU, no model", part_of="interface"
    ),
}
ALL = "all"

COMPONENTS = {
    "interface": "interfaces",
    "backend": "backends",
    "dataset": "datasets",
    "environment": "environments",
    "reward": "interfaces",
}
"""Kind → its name in the registry."""
FOLDERS = {**COMPONENTS, "family": "families", "recipe": "recipes"}
"""Kind → the folder of its files, and of its tests below `tests/`."""
MENTIONED = {
    "interface": ("interfaces", "ops"),
    "reward": ("interfaces", "ops"),
    "dataset": ("datasets",),
    "environment": ("environments", "interfaces"),
}
"""Kind → the folders below `tests/` in which files that mention a component, or import a helper
module of its, belong to it. Not those of backends, which most of their tests name as a means, and
which take long."""
MATHEMATICS = "ops"
"""The folder of rlcli whose modules count as helpers of the components that import them."""
FAMILIES = PACKAGE / "checkpoint" / "families"


@dataclass(frozen=True)
class Subject:
    """One component or recipe to be tested."""

    kind: str
    name: str
    file: Path
    values: tuple[str, ...] = ()
    """`key=value` from the command line: arguments of a component, overrides of a recipe."""

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name}"

    @functools.cached_property
    def own_tests(self) -> tuple[Path, ...]:
        """Its own test files: the one that is named after it, and those of its project that mention
        it and no other component."""
        named = [] if self.named_tests is None else [self.named_tests]
        projects = [home for home in _homes() if self._is_in(home)]
        mentioning = [file for home in projects for file in self._files_about(home / "tests")]
        return tuple(dict.fromkeys([*named, *mentioning]))

    @functools.cached_property
    def named_tests(self) -> Path | None:
        """The test file that is named after it, in the user's project or in this checkout."""
        stem = self.file.stem if self.kind == "recipe" else module_name(self.name)
        name = re.sub(r"\W", "_", stem)
        files = (home / "tests" / FOLDERS[self.kind] / f"test_{name}.py" for home in _homes())
        return next((file for file in files if file.is_file()), None)

    def _is_in(self, project: Path) -> bool:
        return any(self.file.is_relative_to(project / folder) for folder in OF_PROJECT)

    def _files_about(self, tests: Path) -> list[Path]:
        """The files below `tests` that mention it, and that are named after no other."""
        if self.kind not in MENTIONED:
            return []
        folders = [tests / folder for folder in MENTIONED[self.kind]]
        module = registry.module_of(COMPONENTS[self.kind], self.name)
        components = _modules()
        helpers = helpers_of(module, components, partial(_file_of, tests.parent))
        files = files_about(
            {self.name, module_name(self.name)}, module, helpers, components, folders
        )
        named_after_any = {folders[0] / f"test_{module_name(name)}.py" for name in names(self.kind)}
        return [file for file in files if file not in named_after_any - {self.named_tests}]

    def load(self) -> None:
        """Import its file, so that a broken one is reported at once. Raises ProjectError."""
        if self.kind in COMPONENTS:
            registry.load(COMPONENTS[self.kind], self.name)
        elif self.kind == "family":
            from rlcli.checkpoint.families import family_of

            family_of(self.name)


def _homes() -> list[Path]:
    """The user's project, and this checkout if it is one."""
    checkout = [PACKAGE.parent] if is_project(PACKAGE.parent) else []
    project = current_project()
    return list(dict.fromkeys([*([] if project is None else [project]), *checkout]))


def _file_of(project: Path, module: str) -> Path | None:
    """The file of a module, if it may be a helper of a component of this project."""
    package, folder, *inner = [*module.split("."), "", ""]
    if package != "rlcli" or folder not in (*OF_PROJECT, MATHEMATICS):
        return None
    home = project / "rlcli" / folder if folder == MATHEMATICS else project / folder
    file = home.joinpath(*inner).with_suffix(".py")
    return file if file.is_file() else None


def _modules() -> set[str]:
    """The modules of all components."""
    with search_paths_kept():
        return {
            registry.module_of(kind, name)
            for kind in registry.KINDS
            for name in registry.names(kind)
        }


def subjects(kind: str, name: str | None = None, values: Sequence[str] = ()) -> list[Subject]:
    """One subject of a kind; without a name all of them. Raises UsageError and whatever looking up
    the name raises."""
    if kind not in (*KINDS, ALL):
        raise _no_kind(kind)
    if name is None:
        if values:
            raise UsageError(
                f"{values[0]} is meant for one component; {kind} names "
                f"{'all' if kind == ALL else 'several'}",
                hint="name the one that it is for: rlcli test KIND NAME KEY=VALUE",
            )
        kinds = (
            [title for title, about in KINDS.items() if not about.part_of]
            if kind == ALL
            else [kind]
        )
        return [
            Subject(title, subject, file)
            for title in kinds
            for subject, file in names(title).items()
        ]
    if kind == ALL:
        raise UsageError(
            f"all takes no name, but {name!r} follows it", hint=f"rlcli test KIND {name}"
        )
    return [replace(_one(kind, name), values=tuple(values))]


def _one(kind: str, name: str) -> Subject:
    if kind in COMPONENTS:
        path = registry.path_of(COMPONENTS[kind], name)
        if kind == "reward" and not _scores_texts(name):
            raise UsageError(
                f"{name} has no score_texts",
                hint=f"rlcli test interface {name} runs all its checks",
            )
        return Subject(kind, name, path)
    if kind == "recipe":
        return _recipe(name)
    files = names(kind)
    if name not in files:
        close = nearest_name(name, files)
        guess = f"; did you mean {close!r}?" if close else ""
        raise UnknownComponent(
            f"no family is named {name!r}{guess}", hint=f"the families are {', '.join(files)}"
        )
    return Subject(kind, name, files[name])


def _recipe(name: str) -> Subject:
    from rlcli.recipe.parsing.finding import find_recipe
    from rlcli.recipe.parsing.problems import Problems

    problems = Problems()
    path = find_recipe(name, problems)
    if path is None:
        raise RecipeError(problems.reported)
    return Subject("recipe", name, path)


def names(kind: str) -> dict[str, Path]:
    """All names of a kind, with their files."""
    if kind == "reward":
        return {name: path for name, path in names("interface").items() if _scores_texts(name)}
    if kind in COMPONENTS:
        return registry.names(COMPONENTS[kind])
    if kind == "recipe":
        from rlcli.recipe.parsing.finding import whole_recipe_names

        return whole_recipe_names()
    folders = [FAMILIES, *map(Path, search_path("families"))]
    files = (file for folder in folders for file in sorted(folder.glob("[a-z]*.py")))
    return {_model_type(file): file for file in files}


def _scores_texts(name: str) -> bool:
    try:
        return "score_texts" in registry.signature("interfaces", name).methods
    except RlcliError:
        return False


def _model_type(file: Path) -> str:
    """The model type that a family's file registers; its stem,
    if that cannot be determined without importing it."""
    text = file.read_text(encoding="utf-8", errors="replace")
    names_registered = re.findall(
        r"^@?register_hf_family\(\s*[\"']([^\"']+)[\"']", text, flags=re.MULTILINE
    )
    return next((name for name in names_registered if module_name(name) == file.stem), file.stem)


def _no_kind(word: str) -> UsageError:
    """Error for an unknown kind, with what was probably meant: a plural, or a component's name."""
    component_kind = next((kind for kind, folder in FOLDERS.items() if folder == word), None)
    homes = [kind for kind in KINDS if word in names(kind) or module_name(word) in names(kind)]
    close = nearest_name(word, [*KINDS, ALL])
    if component_kind is not None:
        hint = f"rlcli test {component_kind}"
    elif homes:
        hint = (
            f"it is {'an' if homes[0][0] in 'aeiou' else 'a'} {homes[0]}: rlcli "
            f"test {homes[0]} {word}"
        )
    else:
        hint = f"did you mean {close}?" if close else f"the kinds are {', '.join(KINDS)}, or all"
    return UsageError(f"{word!r} is not a kind of component", hint=hint)
