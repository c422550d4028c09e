"""The files that `rlcli new` would write: for each kind, rendered, with a description."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlcli import registry
from rlcli.api.component import module_name
from rlcli.errors import UsageError
from rlcli.project import PACKAGE
from rlcli.registry.listing import subfolders
from rlcli.scaffold.names import checked, class_name, title_of_project
from rlcli.scaffold.templates import render

TESTED = "its test, which passes as it stands"
BY_LAYER = "a layer: --with {layer}"

KINDS: dict[str, dict[str, tuple[str, str]]] = {
    "dataset": {
        "dataset.py.j2": ("datasets/{module}.py", "the class {cls}"),
        "test_dataset.py.j2": ("tests/datasets/test_{module}.py", TESTED),
        "dataset.yaml.j2": ("recipes/data/{name}.yaml", BY_LAYER),
    },
    "environment": {
        "environment.py.j2": ("interfaces/environments/{module}.py", "the class {cls}"),
        "test_environment.py.j2": ("tests/environments/test_{module}.py", TESTED),
        "environment.yaml.j2": ("recipes/environments/{name}.yaml", BY_LAYER),
    },
    "interface": {
        "interface.py.j2": ("interfaces/{module}.py", "the class {cls}"),
        "test_interface.py.j2": ("tests/interfaces/test_{module}.py", TESTED),
    },
    "reward": {
        "reward.py.j2": ("interfaces/{module}.py", "the class {cls}"),
        "test_reward.py.j2": ("tests/interfaces/test_{module}.py", TESTED),
        "reward.yaml.j2": ("recipes/rewards/{name}.yaml", BY_LAYER),
    },
    "estimator": {
        "estimator.py.j2": ("interfaces/{module}.py", "the class {cls}"),
        "test_estimator.py.j2": ("tests/interfaces/test_{module}.py", TESTED),
    },
    "backend": {
        "backend.py.j2": ("backends/{module}.py", "the class {cls}"),
        "test_backend.py.j2": ("tests/backends/test_{module}.py", TESTED),
    },
    "recipe": {"recipe.yaml.j2": ("recipes/{name}.yaml", "a thin recipe: it extends ppo_math")},
    "family": {
        "family.py.j2": ("families/{module}.py", "the class {cls}, for the model_type {name}"),
        "test_family.py.j2": ("tests/families/test_{module}.py", TESTED),
    },
}
"""Kind → template → (the resulting file, its description)."""

COPIES = {"interface.py.j2": None, "test_interface.py.j2": "test_copied_interface.py.j2"}
"""For a copy of a component: template → its replacement; None: the component's own file."""

WITHOUT_ANSWER = {
    "reward.py.j2": "reward_without_answer.py.j2",
    "test_reward.py.j2": "test_reward_without_answer.py.j2",
}
"""Likewise for a reward that does not look at the row's answer."""

PROJECT = {
    "pyproject.toml.j2": ("pyproject.toml", "marks the folder as a project"),
    "gitignore.j2": (".gitignore", "runs and caches stay out of git"),
    "README.md.j2": ("README.md", "the next commands"),
    "first.yaml.j2": ("recipes/first.yaml", "a recipe that trains within a minute"),
    "gitkeep.j2": ("{folder}/.gitkeep", "room for {folder} of your own"),
}
COMPONENT_FOLDERS = ("interfaces", "backends", "datasets")

FOLDERS = {
    "dataset": "datasets",
    "environment": "environments",
    "interface": "interfaces",
    "reward": "interfaces",
    "estimator": "interfaces",
    "backend": "backends",
}
"""Kind → the registry's kind of its component."""

FIRST_STEP = {
    "dataset": "say in _read() which fields of a row you need",
    "environment": "write its tools, or step(), and score()",
    "interface": "write your loss into _loss()",
    "reward": "write your rule into score()",
    "estimator": "write your estimator into estimate()",
    "backend": "add what your engine lacks",
    "recipe": "put in what differs",
    "family": "say what differs from Llama",
    "project": "train the small recipe",
}


@dataclass(frozen=True)
class NewFile:
    """A file to be written."""

    path: Path
    text: str
    about: str
    """One-line description."""


@dataclass(frozen=True)
class Scaffold:
    """Everything that one `rlcli new` writes."""

    root: Path
    """The project's folder, which contains the files."""
    files: tuple[NewFile, ...]
    first_step: str
    """The author's first step."""
    command: str
    """The command to run next, in the root."""


def plan(
    kind: str, name: str, root: Path, like: str | None = None, without_answer: bool = False
) -> Scaffold:
    """The files of a component or recipe in the project at `root`. `like`: an interface to start
    from a copy of; `without_answer`: a reward that does not look at the row's answer.

    Raises UsageError for an invalid name, UnknownComponent for an interface that does not exist.
    """
    checked(kind, name)
    _refuse_misplaced(kind, name, like, without_answer)
    _refuse_name(kind, name, root)
    replacements = COPIES if like is not None else WITHOUT_ANSWER if without_answer else {}
    words = _words(kind, name, like, without_answer)
    files = []
    for template, (target, about) in KINDS[kind].items():
        path = target.format(**words)
        words["layer"] = re.sub(r"^recipes/|\.yaml$", "", path)
        text = _text(replacements.get(template, template), template, words)
        if path.endswith(".py"):
            _refuse_hiding(text, words["cls"], name)
        files.append(NewFile(root / path, text, about.format(**words)))
    tested = FOLDERS.get(kind, f"{kind}s").removesuffix("s")
    first = FIRST_STEP[kind] if like is None else f"change what should differ from {like}"
    return Scaffold(root, tuple(files), first, f"rlcli test {tested} {name}")


def _words(kind: str, name: str, like: str | None, without_answer: bool) -> dict[str, str]:
    """What templates are filled with."""
    rows = "any dataset of prompts" if without_answer else "a dataset whose rows have an answer"
    return {
        "name": name,
        "module": module_name(name),
        "cls": class_name(kind, name),
        "like": like or "",
        "needs": rows,
    }


def _text(chosen: str | None, template: str, words: Mapping[str, str]) -> str:
    """The text of a file; without a `chosen` template that of the interface to start from."""
    if words["like"] and not chosen:
        return _copied(words["like"], words["name"], words["cls"])
    return render(chosen or template, **words)


def _refuse_misplaced(kind: str, name: str, like: str | None, without_answer: bool) -> None:
    """Refuse options of other kinds."""
    for is_misplaced, option, purpose in (
        (like is not None and kind != "interface", "--like", "copies interfaces"),
        (without_answer and kind != "reward", "--without-answer", "is for rewards"),
    ):
        if is_misplaced:
            hint = f"leave it out: rlcli new {kind} {name}"
            raise UsageError(f"{option} {purpose} only", hint=hint)


def _refuse_name(kind: str, name: str, root: Path) -> None:
    """Refuse a name that is taken."""
    if kind in FOLDERS:
        _refuse_taken(FOLDERS[kind], name, root)
    elif kind == "recipe":
        _refuse_taken_recipe(name, root)
    elif (PACKAGE / "checkpoint" / "families" / f"{module_name(name)}.py").exists():
        raise UsageError(
            f"{name!r} is the name of a built-in family", hint="choose another name", code="R68"
        )


def plan_project(folder: Path) -> Scaffold:
    """The files of a new project. Raises UsageError for an invalid folder name."""
    root = folder.expanduser().resolve()
    title = title_of_project(root)
    files = []
    for template, (target, about) in PROJECT.items():
        for inner in COMPONENT_FOLDERS if "{folder}" in target else ("",):
            text = render(template, name=title)
            files.append(
                NewFile(root / target.format(folder=inner), text, about.format(folder=inner))
            )
    return Scaffold(root, tuple(files), FIRST_STEP["project"], "rlcli train first")


def _copied(like: str, name: str, cls: str) -> str:
    """An interface as a file of the folder of interfaces, with its class renamed and registered
    under the new name."""
    original = registry.signature("interfaces", like)
    text = re.sub(rf"\b{original.class_name}\b", cls, original.path.read_text(encoding="utf-8"))
    subfolder = (
        registry.module_of("interfaces", like).removeprefix("rlcli.interfaces").rpartition(".")[0]
    )
    if "." in like:
        text = _with_absolute_imports(text, like)
    elif subfolder:
        text = _moved_up(text, subfolder)
    return re.sub(r"(\bregister_interface\(\s*)([\"'])[^\"']+\2", rf"\g<1>\g<2>{name}\g<2>", text)


def _with_absolute_imports(text: str, module: str) -> str:
    """A file of an installed package with the imports that it needs in a project; `module` is
    "their_lab.rewards.brevity"."""

    def absolute(statement: re.Match[str]) -> str:
        package = module.split(".")[: -len(statement["dots"])]
        return statement["before"] + ".".join(filter(None, [*package, statement["name"]]))

    relative = r"^(?P<before>\s*from )(?P<dots>\.+)(?P<name>\w*)"
    return re.sub(relative, absolute, text, flags=re.MULTILINE)


def _moved_up(text: str, subfolder: str) -> str:
    """A file of a subfolder with the relative imports that it needs one folder above;
    `subfolder` is ".rewards"."""
    text = re.sub(r"^from \.(?=\w)", f"from {subfolder}.", text, flags=re.MULTILINE)
    text = re.sub(r"^from \.(?= import)", f"from {subfolder}", text, flags=re.MULTILINE)
    return re.sub(r"^from \.\.", "from .", text, flags=re.MULTILINE)


def _refuse_taken(folder: str, name: str, root: Path) -> None:
    """Refuse a name that a component elsewhere has, or a folder of components, which its module
    would hide; `write` reports one that exists in the project itself."""
    if (hidden := subfolders(folder).get(module_name(name))) is not None:
        raise UsageError(
            f"{name!r} is the name of a folder of components: {hidden}",
            hint="choose another name",
            code="R68",
        )
    taken = registry.names(folder).get(module_name(name))
    if taken is not None and not taken.resolve().is_relative_to((root / folder).resolve()):
        singular = folder.removesuffix("s")
        message = f"{name!r} is the name of a built-in {singular}: {taken}"
        raise UsageError(
            message,
            hint=f"choose another name; look at that one: rlcli show {taken.stem}",
            code="R68",
        )


def _refuse_taken_recipe(name: str, root: Path) -> None:
    from rlcli.recipe.parsing.finding import recipe_names

    taken = recipe_names().get(name)
    if taken is not None and not taken.resolve().is_relative_to(root.resolve() / "recipes"):
        hint = f"choose another name; to start from that one: rlcli cp {name} NEW.yaml"
        raise UsageError(
            f"{name!r} is the name of a built-in recipe: {taken}", hint=hint, code="R68"
        )


def _refuse_hiding(text: str, cls: str, name: str) -> None:
    """Refuse a class name that hides something the file imports."""
    imports = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    if any(alias.name == cls for node in imports for alias in node.names):
        message = f"{name!r} would name its class {cls}, which is the name of its contract"
        raise UsageError(message, hint="choose another name", code="R68")
