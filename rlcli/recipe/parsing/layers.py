"""Find and read the layers of a recipe: `extends:` first, in order, then the file itself."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rlcli import registry
from rlcli.api.run_folder import RESOLVED_RECIPE, is_run
from rlcli.recipe.parsing.merge import spell_out_types, with_valid_markers
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.reader import parse, read_file
from rlcli.recipe.parsing.tree import Listing, MappingNode, Mark, Node, Scalar, is_null, kind_of
from rlcli.recipe.synonyms import absent
from rlcli.spelling import did_you_mean, name_of_file, nearest_name

MAX_LAYERS = 64
ROWS = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
"""Endings of files of rows, none of which is that of a recipe."""

PROFILES = "profiles/"
"""Subfolder of recipes to apply on top of others: a cluster, a size, never a complete recipe."""
PARTS = ("base/", "data/", "environments/", "rewards/")
"""Subfolders of layers that recipes extend: graphs and defaults, datasets, episodes, rewards."""


@dataclass(frozen=True)
class Layer:
    """One file of a recipe."""

    file: str
    """Name used in messages: relative to the working directory if possible."""
    label: str
    """A relative name, unique among the layers, for the copy in the run directory."""
    path: Path
    text: str
    """The file as written."""
    tree: MappingNode
    """Without `extends:`; component shorthands spelt out."""
    pulled_in_by: Mark | None
    """The `extends:` entry or `--with` option that names it; None for the recipe itself."""


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


def _is_file(path: Path) -> bool:
    """Whether a file exists, as far as one may look."""
    try:
        return path.is_file()
    except OSError:
        return False


class Collector:
    """Reads layers and those that they extend, each once."""

    def __init__(self, roots: list[Path], problems: Problems):
        self.roots = roots
        self.problems = problems
        self.layers: list[Layer] = []
        self.open: list[tuple[Path, str]] = []
        self.seen: set[Path] = set()

    def lay(self, path: Path, asked_by: Mark) -> None:
        """Add a layer named on the command line."""
        if path.resolve() in self.seen:
            below = next(
                (layer for layer in self.layers if layer.path.resolve() == path.resolve()), None
            )
            by = below.pulled_in_by if below else None
            role = (
                f"already a layer, pulled in by {by.file_and_line}" if by else "the recipe itself"
            )
            self.problems.add("R05", f"{shown(path)} is {role}", asked_by, "name each layer once")
            return
        self.add(path, self.label(path, path.parent), asked_by)

    def add(self, path: Path, label: str, asked_by: Mark | None) -> None:
        """Add a layer, after all layers that it extends."""
        real = path.resolve()
        if circle := self._circle(real):
            self.refuse("R52", f"the layers extend each other: {' → '.join(circle)}", asked_by)
            return
        if real in self.seen:
            return
        self.seen.add(real)
        if len(self.seen) > MAX_LAYERS:
            self.refuse("R52", f"more than {MAX_LAYERS} layers", asked_by)
            return
        file = shown(path)
        text = read_file(path, file, self.problems, asked_by)
        tree = self._mapping_of(file, text, asked_by)
        if text is None or tree is None:
            return
        self.open.append((real, file))
        self.extend(tree.get("extends"), path)
        self.open.pop()
        spelt = self._spelt_out(tree)
        self.layers.append(Layer(file, self.unique(label), path, text, spelt, asked_by))

    def _spelt_out(self, tree: MappingNode) -> MappingNode:
        """Without what it extends, which is a layer of its own."""
        content = with_valid_markers(tree.without_keys(["extends"]), self.problems)
        spelt = spell_out_types(content)
        assert isinstance(spelt, MappingNode)
        return spelt

    def _circle(self, real: Path) -> list[str]:
        """The files from this one to itself again, if it is being read."""
        names = [name for _, name in self.open]
        opened = [path for path, _ in self.open]
        if real not in opened:
            return []
        circle = names[opened.index(real) :]
        return [*circle, circle[0]]

    def _mapping_of(self, file: str, text: str | None, asked_by: Mark | None) -> MappingNode | None:
        """The content of a file; None if something is wrong with it."""
        if text is None:
            self.problems.is_cut_off = True
            return None
        self.problems.add_source(file, text, asked_by)
        tree = parse(text, file, self.problems)
        if tree is None or (isinstance(tree, Scalar) and not tree.valid):
            self.problems.is_cut_off = True
            return None
        if not isinstance(tree, MappingNode):
            content = "nothing" if is_null(tree) else kind_of(tree)
            self.refuse("R02", f"expected a mapping at the top level, found {content}", tree.mark)
            return None
        return tree

    def refuse(self, code: str, message: str, mark: Mark | None, hint: str | None = None) -> None:
        """Report why a layer is missing; the recipe cannot be judged without it."""
        self.problems.add(code, message, mark, hint)
        self.problems.is_cut_off = True

    def unique(self, label: str) -> str:
        taken = {layer.label for layer in self.layers}
        while label in taken:
            label = f"also/{label}"
        return label

    def extend(self, node: Node | None, child: Path) -> None:
        if node is None:
            return
        for item in node.items if isinstance(node, Listing) else (node,):
            if isinstance(item, Scalar) and not item.valid:
                self.problems.is_cut_off = True
            elif (
                not isinstance(item, Scalar)
                or not isinstance(item.value, str)
                or not item.value.strip()
            ):
                self.refuse("R37", f"extends: names recipe files, found {kind_of(item)}", item.mark)
            elif located := self.find(item.value, child, item.mark):
                self.add(*located, item.mark)

    def find(self, name: str, child: Path, mark: Mark) -> tuple[Path, str] | None:
        """The file of a layer and its label; None, with the reason reported, if not found."""
        if refusal := self.refusal(name):
            near = name_of_file(name, recipe_names())
            hint = near and f"did you mean {near}?"
            self.refuse("R55", f"extends {name}: {refusal}", mark, hint)
            return None
        folders = [child.parent, *self.roots]
        for folder in folders:
            file = next(filter(_is_file, (folder / name, folder / f"{name}.yaml")), None)
            if file is None:
                continue
            if Path(name).is_absolute():
                return file, file.name
            if not file.resolve().is_relative_to(folder.resolve()):
                self.refuse("R55", f"extends {name}: {file} points outside {folder}", mark)
                return None
            return file, self.label(file, folder)
        self.refuse_missing(name, folders, mark)
        return None

    def refuse_missing(self, name: str, folders: Sequence[Path], mark: Mark) -> None:
        chain = " → ".join([*(opened for _, opened in self.open), name])
        looked = ", ".join(shown(folder) or "." for folder in folders)
        names = recipe_names()
        hint = did_you_mean(name_of_file(name, names) or name, names, f"looked in {looked}")
        hint = f"write a list: extends: [{name}]" if "," in name else hint
        self.refuse("R51", f"no such layer: {chain}", mark, hint)

    def refusal(self, name: str) -> str | None:
        """Why no layer may have a name; None if it may."""
        is_url = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", name) is not None
        if is_url or any(sign in name for sign in ("\\", "\0", "${")):
            return "a layer is a file, named by a relative path"
        is_elsewhere = Path(name).is_absolute() and not self.inside(name)
        if name.startswith("~") or ".." in Path(name).parts or is_elsewhere:
            return "a layer must be in the recipe's folder or below it, or in a recipes folder"
        return None

    def label(self, path: Path, folder: Path) -> str:
        for root in self.roots:
            if path.resolve().is_relative_to(root.resolve()):
                return path.resolve().relative_to(root.resolve()).as_posix()
        return path.relative_to(folder).as_posix()

    def inside(self, name: str) -> bool:
        return any(Path(name).resolve().is_relative_to(root.resolve()) for root in self.roots)
