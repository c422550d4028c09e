"""Lists the available components by the names of files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from rlcli.api.component import KINDS, module_name
from rlcli.api.elsewhere import COMPONENTS
from rlcli.errors import ProjectError, UnknownComponent
from rlcli.project import (
    NESTED,
    cached_search,
    component_folders,
    is_built_in,
    module_place,
    package_of,
    search_path,
)
from rlcli.spelling import nearest_name

NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")
"""Pattern of valid component names; a name is therefore never a path or a Python expression."""


def names(kind: str) -> dict[str, Path]:
    """The components of a kind and their files, sorted; files and subfolders that start with `_`
    are shared code. Of several files with one name, whose component cannot be used, the first."""
    return {name: files[0] for name, files in _files(kind).items()}


@cached_search
def _files(kind: str) -> dict[str, list[Path]]:
    """Name → the files that have it: several only by mistake.

    Raises ProjectError for a name that is that of a subfolder, which its module would hide.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of component; the kinds are {', '.join(KINDS)}")
    files: dict[str, list[Path]] = {}
    inner = subfolders(kind)
    for folder in component_folders(kind):
        with os.scandir(folder) as entries:
            modules = [entry.name[:-3] for entry in entries if _is_module(entry)]
        for stem in modules:
            files.setdefault(stem, []).append(folder / f"{stem}.py")
    for name in files.keys() & inner.keys():
        problem = f"a component named {name!r} would hide the folder {inner[name]}"
        raise ProjectError(problem, where=str(files[name][0]), hint="rename the file")
    return dict(sorted(files.items()))


def subfolders(kind: str) -> dict[str, Path]:
    """The subfolders with components of a kind, or of one within it, by name."""
    inner = component_folders(kind)[len(search_path(kind)) :]
    nested = {name: Path(kind, name) for name, outer in NESTED.items() if outer == kind}
    return nested | {folder.name: folder for folder in inner}


def _is_module(entry: os.DirEntry[str]) -> bool:
    stem, ending = os.path.splitext(entry.name)
    return (
        ending == ".py" and bool(NAME.fullmatch(stem)) and stem.isidentifier() and entry.is_file()
    )


def _only_file(kind: str, files: list[Path]) -> Path:
    """The file of a component. Raises ProjectError if others have its name."""
    path, *others = files
    if others:
        hint = "choose another name for yours"
        if all(map(is_built_in, files)):
            hint = (
                "one is installed and one is this checkout: pip install -e . installs the checkout"
            )
        problem = f"two {kind} are named {path.stem!r}: {path} and {others[0]}"
        raise ProjectError(problem, hint=hint)
    return path


def path_of(kind: str, name: str) -> Path:
    """The file that contains a component; a dotted name is that of an installed module."""
    if "." in name and all(map(str.isidentifier, name.split("."))):
        return _installed(kind, name)
    files = _files(kind)
    having = files.get(module_name(name)) if NAME.fullmatch(name) else None
    if having is None:
        raise _unknown(kind, name, list(files))
    return _only_file(kind, having)


def module_of(kind: str, name: str) -> str:
    """The name of a component's module in every process: `rlcli.interfaces.grpo`, in a subfolder
    `rlcli.interfaces.rewards.math_reward`; a dotted name is that of its module."""
    if "." in name:
        return name
    path = path_of(kind, name)
    in_subfolder = str(path.parent) not in search_path(kind)
    return ".".join([package_of(kind), *([path.parent.name] if in_subfolder else []), path.stem])


_FOR_FILES = {
    "datasets": "rows are given as the argument path: {type: hf, args: {path: FILE}}",
    "interfaces": (
        "a reward function is given as the argument path: "
        "{type: function_reward, args: {path: FILE.py, function: NAME}}"
    ),
}
"""What to write instead of the name of a file."""


def _installed(kind: str, name: str) -> Path:
    path = module_place(name)
    if path is None or not path.is_file():
        if name.endswith((".py", ".jsonl", ".json", ".csv", ".parquet")):
            hint = _FOR_FILES.get(kind, "a component is named without .py")
            raise UnknownComponent(f"no {kind.removesuffix('s')} is named {name!r}", hint=hint)
        hint = f"install its package; the {kind} that need no dots are {', '.join(names(kind))}"
        raise UnknownComponent(
            f"no {kind.removesuffix('s')} is named {name!r}: there is no such module", hint=hint
        )
    return path


def _unknown(kind: str, name: str, files: list[str]) -> UnknownComponent:
    folders = search_path(kind)
    listed = (
        f"the {kind} are {', '.join(files) or 'none'}; searched {', '.join(folders) or 'no folder'}"
    )
    if problem := _misnamed(kind, name, folders):
        return UnknownComponent(problem, hint=listed)
    problem = f"no {kind.removesuffix('s')} is named {name!r}"
    if instead := COMPONENTS.get((kind, name)):
        return UnknownComponent(problem, hint=instead)
    if meant := called_elsewhere(kind, module_name(name)):
        return UnknownComponent(f"{problem}; rlcli has {meant!r} instead", hint=listed)
    near = nearest_name(module_name(name), files)
    guess = f"; did you mean {near!r}?" if near else ""
    return UnknownComponent(f"{problem}{guess}", hint=listed)


def _misnamed(kind: str, name: str, folders: Iterable[str]) -> str | None:
    """Why a file, or else a name, cannot be that of a component; None if it can."""
    singular = kind.removesuffix("s")
    article = "an" if singular[0] in "aeiou" else "a"
    rule = f"{article} {singular}'s name is a lower-case letter, then letters, digits, _ or -"
    for folder in map(Path, folders):
        if _has_file(folder, f"{name}.py"):
            file = folder / f"{name}.py"
            return f"{file} cannot be {article} {singular}: {rule}; its file uses _ for -"
    is_valid = NAME.fullmatch(name) is not None
    return None if is_valid else f"{name!r} cannot name {article} {singular}: {rule}"


def called_elsewhere(kind: str, name: str) -> str | None:
    """The component that declares this as another framework's name for it, or for its
    counterpart."""
    from rlcli.registry.signature import signature

    for candidate in _files(kind):
        try:
            words = signature(kind, candidate).constants.get("ELSEWHERE", "")
        except ProjectError:
            continue
        if name in str(words).split():
            return candidate
    return None


def _has_file(folder: Path, name: str) -> bool:
    return any(entry.name == name for entry in folder.iterdir())
