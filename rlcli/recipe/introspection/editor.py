"""Editor support for checking recipes while typing: the schema as a file,
and the setting that points to it.

The settings file belongs to its user: one entry is inserted into its text, comments and all else
stay unchanged, and if that cannot be done reliably the file is left alone.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcli.errors import ResourceError, UsageError
from rlcli.files import not_writable
from rlcli.recipe.introspection.json_schema import MADE_BY

SCHEMA_FILE = Path(".rlcli/recipe.schema.json")
SETTINGS_FILE = Path(".vscode/settings.json")
SETTING = "yaml.schemas"
"""Read by the YAML extension of VS Code, which other editors run as yaml-language-server."""
ENTRY = {f"./{SCHEMA_FILE.as_posix()}": ["recipes/**/*.yaml"]}
MODELINE = "# yaml-language-server: $schema="

State = Literal["new", "changed", "unchanged", "left alone"]


@dataclass(frozen=True)
class FileChange:
    """A project file with its new content."""

    path: Path
    """Relative to the project's folder."""
    state: State
    text: str
    """The file's full new text; for one that is left alone, what its owner could add."""


def planned(folder: Path, schema: dict[str, Any]) -> list[FileChange]:
    """The changes that `install` makes to a project. Raises UsageError for a file that belongs to
    someone else."""
    schema_text = json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
    old = _read(folder, SCHEMA_FILE)
    if old is not None and MADE_BY not in old:
        hint = "move it away, or name another project with --project"
        raise UsageError(
            "not written by rlcli; it is left as it is", where=str(folder / SCHEMA_FILE), hint=hint
        )
    schema_state: State = "new" if old is None else "unchanged" if old == schema_text else "changed"
    return [FileChange(SCHEMA_FILE, schema_state, schema_text), _settings(folder)]


def install(folder: Path, changes: list[FileChange]) -> None:
    """Write the files that are new or changed. Raises ResourceError F75 if that fails."""
    for change in changes:
        if change.state in ("new", "changed"):
            _write(folder / change.path, change.text)


def with_entry(text: str) -> str | None:
    """VS Code settings (JSON with comments) with our entry inserted;
    None if that is not reliable."""
    if not text.strip():
        return json.dumps({SETTING: ENTRY}, indent=2) + "\n"
    try:
        settings = json.loads(_bare(text))
    except ValueError:
        return None
    if not isinstance(settings, dict) or not isinstance(settings.get(SETTING, {}), dict):
        return None
    associations = settings.get(SETTING, {})
    if any(_same_file(name) for name in associations):
        return text
    if SETTING in settings:
        ((name, globs),) = ENTRY.items()
        result = _inserted(text, _opening(_bare(text), SETTING), name, globs)
    else:
        result = _inserted(text, _bare(text).index("{"), SETTING, ENTRY)
    expected = {**settings, SETTING: {**associations, **ENTRY}}
    try:
        return result if json.loads(_bare(result)) == expected else None
    except ValueError:
        return None


def _settings(folder: Path) -> FileChange:
    old = _read(folder, SETTINGS_FILE)
    new = with_entry(old or "")
    if new is None:
        return FileChange(SETTINGS_FILE, "left alone", json.dumps({SETTING: ENTRY}) + "\n")
    return FileChange(
        SETTINGS_FILE, "new" if old is None else "unchanged" if new == old else "changed", new
    )


def _same_file(name: str) -> bool:
    return os.path.normpath(name.removeprefix("/")) == os.path.normpath(SCHEMA_FILE)


# -- JSON with comments ----------------------------------------------------------------------------

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENTS = re.compile(rf"{_STRING}|//[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMAS = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")
"""Both patterns also match strings, so that nothing within a string is taken for a comment or a
comma."""


def _bare(text: str) -> str:
    """The text with comments and trailing commas replaced by spaces;
    every position is preserved."""

    def blank(match: re.Match[str]) -> str:
        token = match.group()
        return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)

    return _TRAILING_COMMAS.sub(blank, _COMMENTS.sub(blank, text))


def _opening(bare: str, outermost: str) -> int:
    """Where the object opens that is the value of an outermost key; there must be one."""
    decoder, position = json.JSONDecoder(), 0
    while True:
        key, position = decoder.raw_decode(bare, bare.index('"', position))
        position = bare.index(":", position) + 1
        position += len(bare[position:]) - len(bare[position:].lstrip())
        if key == outermost and bare[position] == "{":
            return position
        _, position = decoder.raw_decode(bare, position)


def _inserted(text: str, opening: int, key: str, value: Any) -> str:
    """The text with an entry inserted first into the object that opens there."""
    before, rest = text[: opening + 1], text[opening + 1 :]
    around, indent = _indents(before, rest)
    newline = "\r\n" if "\r\n" in text else "\n"
    is_empty = _bare(text)[opening + 1 :].lstrip().startswith("}")
    entry = f"{newline}{indent}{json.dumps(key)}: {json.dumps(value)}{'' if is_empty else ','}"
    if rest[:1] not in "\r\n":
        rest = newline + (around if is_empty else indent) + rest.lstrip(" \t")
    return before + entry + rest


def _indents(before: str, rest: str) -> tuple[str, str]:
    """The indentation of the line with an opening brace, and of what is in the braces."""
    line = before.rpartition("\n")[2]
    around = line[: len(line) - len(line.lstrip(" \t"))]
    within = re.match(r"\r?\n([ \t]+)\S", rest)
    is_deeper = within is not None and len(within[1]) > len(around)
    return around, within[1] if within and is_deeper else around + "    "


# -- files -----------------------------------------------------------------------------------------


def _read(folder: Path, name: Path) -> str | None:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            "points outside the project; it is left as it is", where=str(path), code="S7"
        )
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}"
        raise ResourceError(message, where=str(path), code="F75") from None


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(exist_ok=True)
        try:
            temporary.write_bytes(text.encode())
            if path.exists():
                temporary.chmod(path.stat().st_mode & 0o777)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise not_writable(path, error) from None
