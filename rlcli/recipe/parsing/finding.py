"""Find the file of a recipe or layer by its name or path; what was meant, if there is none."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import get_args

from rlcli import registry
from rlcli.api.run_folder import RESOLVED_RECIPE, is_run
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import Mark
from rlcli.recipe.synonyms import absent
from rlcli.spelling import did_you_mean, name_of_file, nearest_name

ROWS = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
"""Endings of files of rows, none of which is that of a recipe."""

PROFILES = "profiles/"
"""Subfolder of recipes to apply on top of others: a cluster, a size, never a complete recipe."""
PARTS = ("base/", "data/", "environments/", "rewards/")
"""Subfolders of layers that recipes extend: graphs and defaults, datasets, episodes, rewards."""


def recipe_roots() -> list[Path]:
    """Folders that contain recipes: the user's project first, the built-in ones last."""
    from rlcli.project import search_path

    roots: list[Path] = []
    for folder in reversed([Path(entry) for entry in search_path("recipes")]):
        if folder.is_dir() and folder.resolve() not in [root.resolve() for root in roots]:
            roots.append(folder)
    return roots


def recipe_names() -> dict[str, Path]:
    """Every recipe's name (`ppo_math`, `base/ppo`), with its file."""
    files: dict[str, Path] = {}
    for root in recipe_roots():
        for path in sorted(root.rglob("*.yaml")):
            if not any(folder.startswith(".") for folder in path.relative_to(root).parts):
                files.setdefault(path.relative_to(root).with_suffix("").as_posix(), path)
    return dict(sorted(files.items()))


def _named(name: str) -> Path | None:
    """The file of a recipe or layer by name, without reading the folders of recipes."""
    if any(part.startswith((".", "/")) for part in Path(name).parts):
        return None
    files = (root / f"{name}.yaml" for root in recipe_roots())
    return next((path for path in files if path.is_file()), None)


def profile_names() -> dict[str, Path]:
    """Names that `--with` accepts (`gpu8`), with their files."""
    return {
        name.removeprefix(PROFILES): path
        for name, path in recipe_names().items()
        if name.startswith(PROFILES)
    }


def whole_recipe_names() -> dict[str, Path]:
    """The recipes that can be trained, without layers that are only parts of one."""
    return {
        name: path
        for name, path in recipe_names().items()
        if not name.startswith((PROFILES, *PARTS))
    }


def find_recipe(recipe: str | Path, problems: Problems) -> Path | None:
    """A recipe by path (`.yaml` optional) or by name, also written as its file in the folder of
    recipes, `recipes/NAME.yaml`; None, with the reason reported, if not found."""
    text = os.fspath(recipe)
    file, refused = _existing(text, problems)
    if file is not None and file.suffix in ROWS:
        hint = f"to train on it: rlcli train sft --model MODEL --data {text}"
        problems.add("R51", f"{text} holds rows, not a recipe", hint=hint)
        return None
    if file is not None or refused:
        return file
    name = text.removesuffix(".yaml").removeprefix("recipes/")
    named = None if name.startswith(PROFILES) else _named(name)
    if named is not None:
        return named
    kind = "a folder" if Path(text).is_dir() else "not a file"
    message = f"recipe {text!r} not found ({kind}, and no recipe has that name)"
    problems.add("R51", message, hint=_instead_of(text, name.removesuffix(".yml")))
    return None


def _instead_of(text: str, name: str) -> str | None:
    """What was probably meant by a recipe that does not exist; `name`: without its ending."""
    profile, listed = name.removeprefix(PROFILES), whole_recipe_names()
    if "=" in text:
        return f"the recipe comes before its overrides: RECIPE {text}"
    if is_run(Path(text)):
        return _instead_of_run(Path(text))
    if profile in profile_names():
        return f"{profile} is a profile; apply it to a recipe: RECIPE --with {profile}"
    if advice := absent(name):
        return advice
    available = f"available: {', '.join(listed)}" if listed else None
    return did_you_mean(Path(name).name, listed, available)


def _instead_of_run(run: Path) -> str:
    """What to name in place of a run's folder: its recipe, to look at, or the run, to continue."""
    file = run / RESOLVED_RECIPE
    look = f"its recipe is {shlex.quote(str(file))}; " if file.is_file() else ""
    return f"it is the folder of a run; {look}to continue it: rlcli resume {shlex.quote(str(run))}"


def find_profile(profile: str, problems: Problems) -> Path | None:
    """A layer for the command line: a file (`.yaml` optional; any readable one, as the user names
    it), a profile by name, or another layer by name. None, with the reason reported,
    if not found."""
    mark = with_option(profile)
    file, refused = _existing(profile, problems, mark)
    if file is not None or refused:
        return file
    name = profile.removesuffix(".yaml")
    if named := _named(f"{PROFILES}{name}") or _named(name):
        return named
    message = f"layer {profile!r} not found (not a file, and no profile has that name)"
    problems.add("R51", message, mark, _instead_of_layer(name))
    return None


def _instead_of_layer(name: str) -> str | None:
    """What was probably meant by a layer that does not exist."""
    from rlcli.recipe.sections.launch import LaunchSection

    if name in registry.names("backends"):
        return f"it is a backend: write models.actor.backend={name}"
    if name in get_args(LaunchSection.model_fields["type"].annotation):
        return f"it is a launcher: write launch={name}"
    profiles = profile_names()
    layers = [layer for layer in recipe_names() if layer.startswith(PARTS[1:])]
    near = nearest_name(name, [Path(layer).name for layer in layers])
    if near is not None:
        return f"did you mean {name_of_file(near, layers)}?"
    return did_you_mean(name, profiles, f"profiles: {', '.join(profiles)}" if profiles else None)


def with_option(profile: str) -> Mark:
    """The place of a command-line layer, for messages."""
    return Mark(f"--with {profile[:200]}", 0, 0)


def _existing(text: str, problems: Problems, mark: Mark | None = None) -> tuple[Path | None, bool]:
    """The file of that name, if there is one; and whether the name is refused,
    with the reason reported."""
    if "\0" in text or not text:
        problems.add("R59", f"{text!r} is not a valid file name", mark)
        return None, True
    try:
        candidates = [
            path
            for path in (Path(text), Path(f"{text}.yaml"))
            if path.exists() and not path.is_dir()
        ]
    except OSError as error:
        code = "R58" if isinstance(error, PermissionError) else "R59"
        problems.add(code, f"{text[:200]!r}: {error.strerror}", mark)
        return None, True
    return (candidates[0] if candidates else None), False


def shown(path: Path) -> str:
    """A path as shown in messages."""
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except (ValueError, OSError):
        return str(path)
