"""The files of a role's model: looked at before anything is loaded, by `rlcli train` and `rlcli check` alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.api.model_folder import check_folder, check_sizes
from rlcli.errors import ModelError

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved


def check_model_files(resolved: Resolved, role: str) -> None:
    """A folder must be whole and harmless, its tokenizer no larger than its embedding. Raises ModelError."""
    section = resolved.recipe.models[role]
    folder = Path(section.path).expanduser() if section.path is not None else None
    if folder is None or not folder.is_dir():
        return
    tokenizer = Path(section.tokenizer).expanduser() if section.tokenizer is not None else folder
    try:
        check_folder(folder, weights=True)
        if tokenizer.is_dir():
            check_sizes(folder, tokenizer)
    except ModelError as error:
        where = str(resolved.origin(("models", role, "path")))
        raise ModelError(error.what, where=where, hint=error.hint, code=error.code) from None
