"""Read the layers of a recipe: `extends:` first, in order, then the file itself, then those of
`--with`, which must fit it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcli.recipe.parsing.finding import (
    find_profile,
    profile_names,
    recipe_names,
    recipe_roots,
    shown,
    with_option,
)
from rlcli.recipe.parsing.merge import as_layer
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.reader import parse, read_file
from rlcli.recipe.parsing.tree import (
    Listing,
    MappingNode,
    Mark,
    Node,
    Scalar,
    at,
    entries_at,
    is_null,
    kind_of,
    value_at,
)
from rlcli.spelling import did_you_mean, name_of_file, nearest_name

MAX_LAYERS = 64


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


def collect(path: Path, problems: Problems, profiles: Sequence[str] = ()) -> list[Layer]:
    """All layers of a recipe, lowest first, those of `--with` last. A layer reached twice counts
    where it came first; one named by `--with` must be new,
    because otherwise it would not be on top."""
    collector = Collector(recipe_roots(), problems)
    collector.add(path, path.name, None)
    for profile in profiles:
        if file := find_profile(profile, problems):
            below = collector.layers[:]
            collector.lay(file, with_option(profile))
            _check_base(profile, below, collector.layers, problems)
        else:
            problems.is_cut_off = True
    return collector.layers


def _check_base(
    profile: str, below: Sequence[Layer], layers: Sequence[Layer], problems: Problems
) -> None:
    """Refuse a layer of `--with` that sets the block of an algorithm's base, such as `ppo` of
    `base/ppo`, for a recipe that does not extend it."""
    bases = _bases_needed(layers[len(below) :], below)
    if not bases:
        return
    recipe = below[-1].path.stem if below else "the recipe"
    fitting = [name for name, path in profile_names().items() if _fits(_layers_of(path), below)]
    near = nearest_name(profile, fitting)
    message = f"{profile} is for recipes that extend {bases[0]}, and {recipe} does not"
    hint = f"did you mean --with {near}?" if near else f"profiles that fit: {', '.join(fitting)}"
    problems.add("R51", message, with_option(profile), hint)
    problems.is_cut_off = True


def _bases_needed(layers: Sequence[Layer], below: Sequence[Layer]) -> list[str]:
    """The bases whose blocks some layers set, but none of those below."""
    from rlcli.recipe.schema import SECTIONS  # names of recipes are listed without it

    keys = {key for layer in layers for key in layer.tree.entries}
    keys -= {key for layer in below for key in layer.tree.entries}
    files, named = [layer.path.resolve() for layer in (*layers, *below)], recipe_names()
    bases = {f"base/{key}": named.get(f"base/{key}") for key in sorted(keys - {*SECTIONS})}
    return [base for base, path in bases.items() if path and path.resolve() not in files]


def _fits(layers: Sequence[Layer], below: Sequence[Layer]) -> bool:
    """Whether the recipe of the layers below has what some layers change: the blocks, the calls,
    and for a rollout one that samples."""
    names = {name for name, _ in _named("graph", below)}
    changed = {name for name, call in _named("graph", layers) if at(call, ("call",)) is None}
    samples = any(value_at(call, ("call",)) == "generate" for _, call in _named("graph", below))
    has_rollout = any(at(role, ("rollout",)) for _, role in _named("models", layers))
    if has_rollout and not samples:
        return False
    return changed <= names and not _bases_needed(layers, below)


def _named(section: str, layers: Sequence[Layer]) -> list[tuple[str, Node]]:
    """The entries of a section in some layers: names, and what each layer says."""
    return [
        (name, entry.node)
        for layer in layers
        for name, entry in entries_at(layer.tree, (section,)).items()
    ]


def _layers_of(path: Path) -> list[Layer]:
    """A layer with those that it extends, lowest first."""
    collector = Collector(recipe_roots(), Problems())
    collector.add(path, path.name, None)
    return collector.layers


# -- reading them ----------------------------------------------------------------------------------


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
        content = as_layer(tree.without_keys(["extends"]), self.problems)
        self.layers.append(Layer(file, self.unique(label), path, text, content, asked_by))

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


def _is_file(path: Path) -> bool:
    """Whether a file exists, as far as one may look."""
    try:
        return path.is_file()
    except OSError:
        return False
