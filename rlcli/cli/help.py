"""The pages that `--help` prints: every verb by group, and one screen for each verb."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Sequence
from typing import Any

from typer.core import TyperGroup

from rlcli.cli.output import wrapped

GROUP_OF_RECIPE = "Recipe"

SHARED = {"with_": GROUP_OF_RECIPE, "as_json": "Output", "quiet": "Output", "help": "Output"}
"""Options that several verbs share, and the group in which they are listed."""

WIDEST = 80
NARROW = 60
"""Width below which two columns of text do not fit next to each other."""
NARROWEST = 30


def page(command: Any, ctx: Any, verbs: Sequence[tuple[str, list[tuple[str, str]]]] = ()) -> str:
    """Usage, description, parameters and an example, as plain text that fits the terminal."""
    width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))
    doc, example = split_example(command.help or "")
    parts = [_usage(command, ctx, width), wrapped(" ".join(doc.split()), width=width)]
    arguments, groups = _parameters(command, ctx)
    parts += [_verb_rows([(group, rows) for group, rows in verbs if rows], width)] if verbs else []
    parts += [_rows(arguments, width)] if arguments else []
    parts += [f"{title}\n{_rows(rows, width)}" for title, rows in groups.items()]
    parts += [f"Example\n  {example}"] if example else []
    return "\n\n".join(section for section in parts if section) + "\n"


def split_example(text: str) -> tuple[str, str]:
    """(the text, the command after `Example:`)."""
    doc, _, example = inspect.cleandoc(text).partition("Example:")
    return doc.strip(), " ".join(example.split())


def _usage(command: Any, ctx: Any, width: int) -> str:
    words = [ctx.command_path]
    for parameter in command.get_params(ctx):
        if parameter.param_type_name == "argument":
            name = argument_name(parameter)
            words.append(name if parameter.required or name.startswith("[") else f"[{name}]")
    words.append("VERB [ARGUMENTS]" if isinstance(command, TyperGroup) else "[OPTIONS]")
    return wrapped(" ".join(words), rest="    ", width=width)


def argument_name(parameter: Any) -> str:
    """The name of an argument in pages and messages: `RECIPE`, `WHAT...`."""
    name = parameter.metavar or parameter.name.strip("_").upper()
    return f"{name}..." if parameter.nargs == -1 and not name.endswith("...") else name


def _parameters(
    command: Any, ctx: Any
) -> tuple[list[tuple[str, str]], dict[str, list[tuple[str, str]]]]:
    """The rows of the arguments, and the rows of the options by group, shared ones last."""
    arguments: list[tuple[str, str]] = []
    groups: dict[str, list[tuple[str, str]]] = {GROUP_OF_RECIPE: [], "Options": []}
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is None:
            continue
        if parameter.param_type_name == "argument":
            arguments.append((argument_name(parameter), " ".join((parameter.help or "").split())))
        elif parameter.name != "help" or isinstance(
            command, TyperGroup
        ):  # readers of a verb's page know --help
            panel = getattr(parameter, "rich_help_panel", None)
            title = panel if isinstance(panel, str) else SHARED.get(parameter.name, "Options")
            groups.setdefault(title, []).append(_option(parameter, record))
    if isinstance(command, TyperGroup):
        groups = {"Options": [row for rows in groups.values() for row in rows]}
    return arguments, {title: rows for title, rows in groups.items() if rows}


def _option(parameter: Any, record: tuple[str, str]) -> tuple[str, str]:
    """Syntax and meaning of an option; its choices are listed with its default."""
    # early versions of typer escape it
    name, meaning = record[0], " ".join(record[1].split()).replace("\\[", "[")
    words = choices_of(parameter)
    if words:
        name = name.partition(" <")[0].partition(" [")[0]
        if parameter.metavar is None:
            name = f"{name} WORD"
        head, bracket, default = meaning.partition("[default: ")
        head = f"{head.rstrip()} "
        meaning = f"{head}[{', '.join(words)}{'; default: ' if bracket else ']'}{default}"
    return name, meaning


def choices_of(parameter: Any) -> list[str]:
    """The choices of a parameter, if there are few."""
    described = getattr(parameter, "type_descriptor", None) or getattr(parameter, "type", None)
    return [
        str(getattr(choice, "value", choice))
        for choice in getattr(described, "choices", None) or ()
    ]


def _verb_rows(groups: Sequence[tuple[str, list[tuple[str, str]]]], width: int) -> str:
    """Columns of groups, verbs and descriptions; on a narrow terminal,
    headings instead of the first column."""
    if width < NARROW:
        return "\n".join(
            (f"{group}\n" if group else "") + _rows(verbs, width) for group, verbs in groups
        )
    left = max(len(f"{group}  ") if group else 0 for group, _ in groups)
    rows = [
        (f"{'' if number else group:<{left}}{name}", meaning)
        for group, verbs in groups
        for number, (name, meaning) in enumerate(verbs)
    ]
    return _rows(rows, width)


def _rows(rows: Sequence[tuple[str, str]], width: int) -> str:
    """Name and meaning in two columns; a long name gets its own line."""
    if width < NARROW:
        below = [
            f"\n{wrapped(meaning, '    ', '    ', width)}" if meaning else "" for _, meaning in rows
        ]
        return "\n".join(f"  {name}{text}" for (name, _), text in zip(rows, below, strict=True))
    column = min(max(len(name) for name, _ in rows), 26)
    lines = []
    for name, meaning in rows:
        head = f"  {name:<{column}}  "
        if len(name) > column:
            lines.append(f"  {name}")
            head = " " * (column + 4)
        lines.append(
            wrapped(meaning, head, " " * (column + 4), width) if meaning else head.rstrip()
        )
    return "\n".join(lines)
