"""A minimal child of a recipe: `extends:` and only the values that differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcli.errors import UsageError
from rlcli.files import not_writable
from rlcli.recipe.parsing.finding import find_profile, recipe_names, recipe_roots, shown
from rlcli.recipe.parsing.layers import Layer
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import Entry, MappingNode, Scalar, leaves, plain, with_entry
from rlcli.recipe.parsing.write import to_yaml
from rlcli.recipe.resolve import Resolved
from rlcli.recipe.sections.base import NAME_PATTERN


def child_of(parent: Resolved, path: Path, profiles: Sequence[str] = ()) -> str:
    """The text of a child at `path` that resolves to the same as `parent` with its overrides and
    profiles.

    Raises UsageError R68 for an invalid recipe name, R55 if the parent cannot be named from there.
    """
    check_name(path)
    names = [name_from(path, parent.path)]
    for profile in profiles:
        file = find_profile(profile, Problems())
        assert file is not None  # the parent was loaded with it
        names.append(name_from(path, file))
    document: dict[str, Any] = {"extends": names[0] if len(names) == 1 else names}
    overridden = MappingNode({}, parent.tree.mark)
    for tree in parent.override_trees:
        for key_path, node in leaves(tree):
            overridden = with_entry(overridden, key_path, Entry(node.mark, node))
    lines = [*_description(parent), to_yaml(document).rstrip("\n")]
    if overridden.entries:
        # References must stay references: undo the escaping of `to_yaml`.
        lines += ["", to_yaml(plain(overridden, _as_written)).replace("$${", "${").rstrip("\n")]
    return "\n".join(lines) + "\n"


def write_child(path: Path, text: str) -> None:
    """Create the file. Raises UsageError if it exists already,
    ResourceError F75 if it cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"{path} already exists; not overwriting it", hint="choose another name", code="R68"
        ) from None
    except FileNotFoundError:
        raise UsageError(
            f"no such folder: {path.parent}", hint=f"mkdir -p {path.parent}", code="R68"
        ) from None
    except OSError as error:
        raise not_writable(path, error) from None


def check_name(path: Path) -> None:
    """Refuse a file that would not be found as a recipe,
    or whose runs could not be named after it."""
    if path.suffix != ".yaml" or not re.fullmatch(NAME_PATTERN, path.stem):
        stem = re.sub(
            r"[^A-Za-z0-9._-]+", "-", path.stem if path.suffix in (".yaml", ".yml") else path.name
        ).strip("-._")
        better = path.with_name((stem[:64] or "mine") + ".yaml")
        message = (
            f"{path.name!r} is not a valid name for a recipe: use up to 64 letters, digits, '.', "
            "'_' or '-', then .yaml"
        )
        raise UsageError(message, hint=f"for example {better}", code="R68")


def name_from(child: Path, parent: Path) -> str:
    """The parent's name for the child's `extends:`: its recipe name,
    or a path relative to the child."""
    real, folder = parent.resolve(), child.absolute().parent
    names = [name for name, path in recipe_names().items() if path.resolve() == real]
    beside = (
        [real.relative_to(folder.resolve()).as_posix()]
        if real.is_relative_to(folder.resolve())
        else []
    )
    for name in (*names, *beside):
        if _first_of(name, child).resolve() == real:
            return name
    hint = f"write the new recipe into {shown(parent.parent) or '.'} or a folder above it"
    if any(_first_of(name, child) == child.absolute() for name in names):
        hint = "choose another name: there, it would extend itself"
    raise UsageError(f"a recipe at {child} cannot extend {shown(parent)}", hint=hint, code="R55")


def _first_of(name: str, child: Path) -> Path:
    """The file that `extends: name` resolves to in the child, as if the child existed already."""
    folder = child.absolute().parent
    candidates = [
        root / text for root in (folder, *recipe_roots()) for text in (name, f"{name}.yaml")
    ]
    return next((path for path in candidates if path.is_file() or path == child.absolute()), child)


def _description(parent: Resolved) -> list[str]:
    """The comment lines at the top of the parent: what it does, and what it needs,
    unless that may have changed."""
    layer: Layer = next(layer for layer in parent.layers if layer.path == parent.path)
    has_changed = parent.overrides or parent.profiles
    lines = []
    for line in layer.text.splitlines()[:2]:
        if (
            not line.startswith("#")
            or "$schema" in line
            or (line.startswith("# Needs:") and has_changed)
        ):
            break
        lines.append(line.rstrip())
    return lines or [f"# As {layer.path.stem}, with what is written below."]


class _Number(float):
    """A number written as the user wrote it: `1e-4`, not 0.0001."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _as_written(scalar: Scalar) -> Any:
    value = scalar.value
    if isinstance(value, int | float) and not isinstance(value, bool) and scalar.text:
        number = _Number(value)
        number.text = scalar.text
        return number
    return value
