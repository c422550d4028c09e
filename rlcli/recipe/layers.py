"""Find and read the layers of a recipe: `extends:` first, in order, then the file itself."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlcli.errors import escape_control
from rlcli.recipe.merge import check_markers, spell_out_types
from rlcli.recipe.problems import Problems
from rlcli.recipe.reader import parse, read_file
from rlcli.recipe.tree import COMMAND_LINE, Listing, Mapping, Mark, Node, Scalar, kind_of

MAX_LAYERS = 64


@dataclass(frozen=True)
class Layer:
    """One file of a recipe."""

    file: str
    """As messages name it: relative to the working directory where possible."""
    label: str
    """A relative name that is unique among the layers, for the copy in the run directory."""
    path: Path
    text: str
    """The file as written."""
    tree: Mapping
    """Without `extends:`; component shorthands spelt out."""
    pulled_in_by: Mark | None
    """The `extends:` entry that names it; None for the recipe itself."""


def recipe_roots() -> list[Path]:
    """Folders that hold recipes: the user's project first, the built-in ones last."""
    from rlcli.project import search_path

    roots: list[Path] = []
    for folder in reversed([Path(entry) for entry in search_path("recipes")]):
        if folder.is_dir() and folder.resolve() not in [root.resolve() for root in roots]:
            roots.append(folder)
    return roots


def recipe_names(roots: list[Path] | None = None) -> dict[str, Path]:
    """Every recipe by name (`ppo_math`, `base/ppo`), with its file."""
    found: dict[str, Path] = {}
    for root in recipe_roots() if roots is None else roots:
        for path in sorted(root.rglob("*.yaml")):
            if not any(part.startswith(".") for part in path.relative_to(root).parts):
                found.setdefault(path.relative_to(root).with_suffix("").as_posix(), path)
    return dict(sorted(found.items()))


def find_recipe(recipe: str | Path, problems: Problems) -> Path | None:
    """A recipe by path (`.yaml` optional) or by name, or None with the reason noted."""
    text = os.fspath(recipe)
    if "\0" in text or not text:
        problems.add("R59", f"{text!r} is no possible file name")
        return None
    try:
        for candidate in (Path(text), Path(f"{text}.yaml")):
            if candidate.exists() and not candidate.is_dir():
                return candidate
    except OSError as error:
        problems.add("R58" if isinstance(error, PermissionError) else "R59", f"{text[:200]!r}: {error.strerror}")
        return None
    names = recipe_names()
    name = text.removesuffix(".yaml")
    if name in names:
        return names[name]
    from rlcli.recipe.suggest import close_to

    close = close_to(name, names)
    known = ", ".join(n for n in names if not n.startswith("base/"))
    hint = f"did you mean {close}?" if close else f"known by name: {known}" if known else None
    problems.add("R51", f"no recipe {escape_control(text)!r}: neither a file nor a known name", hint=hint)
    return None


def collect(path: Path, problems: Problems, profiles: Sequence[str] = ()) -> list[Layer]:
    """All layers of a recipe, lowest first, those of `--with` last. A layer that is reached twice counts where
    it came first."""
    collector = _Collector(recipe_roots(), problems)
    collector.add(path, path.name, None)
    for profile in profiles:
        if found := find_profile(profile, problems):
            collector.add(found, found.name, Mark(COMMAND_LINE, 0, 0))
    return collector.layers


def find_profile(profile: str, problems: Problems) -> Path | None:
    """A layer for the command line: a file, or the name of one in `recipes/profiles`."""
    for candidate in (Path(profile), *(root / "profiles" / f"{profile}.yaml" for root in recipe_roots())):
        if "\0" not in profile and candidate.is_file():
            return candidate
    from rlcli.recipe.suggest import close_to

    names = [name.removeprefix("profiles/") for name in recipe_names() if name.startswith("profiles/")]
    near = close_to(profile, names)
    hint = f"did you mean {near}?" if near else f"profiles: {', '.join(names)}" if names else None
    problems.add("R51", f"no layer {escape_control(profile)!r}: neither a file nor a profile", hint=hint)
    return None


def shown(path: Path) -> str:
    """A path as messages name it."""
    try:
        return path.resolve().relative_to(Path.cwd().resolve()).as_posix()
    except (ValueError, OSError):
        return str(path)


class _Collector:
    def __init__(self, roots: list[Path], problems: Problems):
        self.roots = roots
        self.problems = problems
        self.layers: list[Layer] = []
        self.open: list[tuple[Path, str]] = []
        self.seen: set[Path] = set()

    def add(self, path: Path, label: str, asked_by: Mark | None) -> None:
        real = path.resolve()
        if real in [opened for opened, _ in self.open]:
            names = [name for opened, name in self.open]
            circle = names[[opened for opened, _ in self.open].index(real) :]
            self.problems.add("R52", "the layers extend each other: " + " → ".join([*circle, circle[0]]), asked_by)
            return
        if real in self.seen:
            return
        self.seen.add(real)
        if len(self.seen) > MAX_LAYERS:
            self.problems.add("R52", f"more than {MAX_LAYERS} layers", asked_by)
            return
        file = shown(path)
        text = read_file(path, file, self.problems, asked_by)
        if text is None:
            return
        self.problems.add_source(file, text, asked_by)
        tree = parse(text, file, self.problems)
        if tree is None:
            return
        if not isinstance(tree, Mapping):
            found = "nothing" if isinstance(tree, Scalar) and tree.value is None else kind_of(tree)
            self.problems.add("R02", f"expected a mapping at the top level, found {found}", tree.mark)
            return
        check_markers(tree, self.problems)
        self.open.append((real, file))
        self.extend(tree.get("extends"), path)
        self.open.pop()
        entries = {key: entry for key, entry in tree.entries.items() if key != "extends"}
        spelt = spell_out_types(replace(tree, entries=entries))
        assert isinstance(spelt, Mapping)
        self.layers.append(Layer(file, self.unique(label), path, text, spelt, asked_by))

    def unique(self, label: str) -> str:
        taken = {layer.label for layer in self.layers}
        while label in taken:
            label = f"also/{label}"
        return label

    def extend(self, node: Node | None, child: Path) -> None:
        if node is None:
            return
        for item in node.items if isinstance(node, Listing) else (node,):
            if not isinstance(item, Scalar) or not isinstance(item.value, str) or not item.value.strip():
                self.problems.add("R37", f"extends: names recipe files, found {kind_of(item)}", item.mark)
            elif found := self.find(item.value, child, item.mark):
                self.add(*found, item.mark)

    def find(self, name: str, child: Path, mark: Mark) -> tuple[Path, str] | None:
        """The file of a layer and its label, or None with the reason noted."""
        refused = None
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", name) or "\\" in name or "\0" in name or "${" in name:
            refused = "a layer is a file, named by a relative path"
        elif name.startswith("~") or ".." in Path(name).parts or (Path(name).is_absolute() and not self.inside(name)):
            refused = "a layer lies beside the recipe or in a recipes folder"
        if refused:
            self.problems.add("R55", f"extends {name}: {refused}", mark)
            return None
        folders = [child.parent, *self.roots]
        for folder in folders:
            for candidate in (folder / name, folder / f"{name}.yaml"):
                try:
                    if not candidate.is_file():
                        continue
                except OSError:
                    continue
                if not candidate.resolve().is_relative_to(folder.resolve()) and not Path(name).is_absolute():
                    self.problems.add("R55", f"extends {name}: {candidate} leads out of {folder}", mark)
                    return None
                return candidate, candidate.name if Path(name).is_absolute() else self.label(candidate, folder)
        chain = " → ".join([*(opened for _, opened in self.open), name])
        looked = ", ".join(shown(folder) or "." for folder in folders)
        self.problems.add("R51", f"no such layer: {chain}", mark, f"looked in {looked}")
        return None

    def label(self, path: Path, folder: Path) -> str:
        for root in self.roots:
            if path.resolve().is_relative_to(root.resolve()):
                return path.resolve().relative_to(root.resolve()).as_posix()
        return path.relative_to(folder).as_posix()

    def inside(self, name: str) -> bool:
        return any(Path(name).resolve().is_relative_to(root.resolve()) for root in self.roots)
