"""Valid names for new components, recipes and projects, and the names of their classes."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from rlcli.api.component import module_name
from rlcli.errors import UsageError
from rlcli.registry.listing import NAME

PROJECT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

SUFFIXES = {
    "dataset": "Dataset",
    "environment": "Environment",
    "interface": "Interface",
    "reward": "Reward",
    "estimator": "Estimator",
    "backend": "Backend",
    "family": "Family",
}
"""Kind → suffix of its class names."""


def checked(kind: str, name: str) -> str:
    """The name, if it is valid for this kind. Raises UsageError."""
    if not NAME.fullmatch(name):
        rule = "a name is a lower-case letter, then letters, digits, _ or -"
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:64]
        hint = f"{rule}; for example {near!r}" if NAME.fullmatch(near) else rule
        article = "an" if kind[0] in "aeiou" else "a"
        raise UsageError(f"{name!r} cannot name {article} {kind}", hint=hint, code="R68")
    if keyword.iskeyword(module_name(name)):
        raise UsageError(
            f"{name!r} is a Python keyword, so its file could not be imported",
            hint="choose another name",
            code="R68",
        )
    return name


def class_name(kind: str, name: str) -> str:
    """`my-data` → `MyDataDataset`, `my-dataset` → `MyDataset`."""
    words = "".join(word.capitalize() for word in re.split(r"[-_]+", name))
    suffix = SUFFIXES.get(kind, "")
    return words if words.endswith(suffix) else words + suffix


def title_of_project(folder: Path) -> str:
    """The name of a project in `folder`, which is that of the folder. Raises UsageError."""
    if not PROJECT_NAME.fullmatch(folder.name):
        rule = "letters, digits, '.', '_' and '-', a letter or digit first"
        raise UsageError(
            f"{folder.name!r} cannot name a project", hint=f"it may have {rule}", code="R68"
        )
    return folder.name
