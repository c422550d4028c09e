"""Model families, one file each; a project adds its own in a folder `families/`."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from rlcli.api.family import HOME, HFFamily, registered_families
from rlcli.errors import ProjectError
from rlcli.project import search_path

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""What a model_type may look like; it comes from an untrusted config.json and names a file to
import."""

_BUILT_IN = Path(__file__).parent


def family_of(model_type: object) -> HFFamily | None:
    """The family of a `model_type`; None if nobody has written one.
    Raises ProjectError for a broken file."""
    if not isinstance(model_type, str) or not NAME.fullmatch(model_type):
        return None
    stem = model_type.replace("-", "_")
    folders = [str(_BUILT_IN), *search_path("families")]
    files = [file for file in (Path(folder) / f"{stem}.py" for folder in folders) if file.is_file()]
    if not files:
        return None
    if len(files) > 1:
        raise ProjectError(
            f"two files are the model family {model_type!r}: {files[0]} and {files[1]}"
        )
    global __path__
    if __path__ != folders:
        __path__ = folders
        importlib.invalidate_caches()
    _import(stem, files[0])
    family = registered_families().get(model_type)
    if family is None:
        raise ProjectError(
            f"the file registers no model family named {model_type!r}",
            where=str(files[0]),
            hint=f"put @register_hf_family({model_type!r}) above its class",
        )
    return family()


def _import(stem: str, file: Path) -> None:
    """Import a family, which registers itself. Raises ProjectError for a broken file."""
    try:
        importlib.import_module(f"{HOME}.{stem}")
    except ProjectError:
        raise
    except Exception as error:
        message = f"the file cannot be imported: {type(error).__name__}: {error}"
        raise ProjectError(message, where=str(file)) from error
