"""Commands that messages, help texts and documents name exist, with their options."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import typer
from sentences import Sentence, all_sentences

from rlcli.cli.main import app

COMMAND = re.compile(r"(?<![\w/.-])rlcli ([a-z][a-z-]*)([^`;,()\n]*)")
IN_CODE = re.compile(r"`rlcli ([a-z][a-z-]*)")
ALSO = {"help", "start"}
"""Understood as `--help`, and a verb of another tool."""


def verbs() -> dict[str, click.Command]:
    """Verb → its command."""
    group = typer.main.get_command(app)
    context = click.Context(group)
    return {name: group.get_command(context, name) for name in group.list_commands(context)}


VERBS = verbs()


def commands_in(sentence: Sentence) -> Iterator[tuple[click.Command, list[str]]]:
    """Commands of rlcli in a sentence, and the words after each."""
    for verb, rest in COMMAND.findall(sentence.text):
        words = rest.split()
        if command := of_group(VERBS.get(verb), words):
            yield command, words


def of_group(command: click.Command | None, words: list[str]) -> click.Command | None:
    """The command, or that of a group which the first word names."""
    subcommands = getattr(command, "commands", None) or {}
    if not subcommands and hasattr(command, "list_commands"):
        context = click.Context(command)
        subcommands = {
            name: command.get_command(context, name) for name in command.list_commands(context)
        }
    return subcommands.get(words[0], command) if words else command


def test_options_of_commands_in_texts_exist():
    unknown = [
        f"{sentence}: {command.name} {word}"
        for sentence in all_sentences()
        for command, words in commands_in(sentence)
        for word in words
        if word.startswith("--") and option_of(word) not in options_of(command)
    ]
    assert not unknown, "\n".join(unknown)


def option_of(word: str) -> str:
    return word.partition("=")[0].rstrip(".:'\"…")


def options_of(command: click.Command) -> set[str]:
    named = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    return named | {"--", "--help"}


def test_verbs_in_code_exist():
    unknown = [
        f"{sentence}: {verb}"
        for sentence in all_sentences()
        for verb in IN_CODE.findall(sentence.text)
        if verb not in VERBS.keys() | ALSO
    ]
    assert not unknown, "\n".join(unknown)


def test_a_made_up_option_is_found():
    sentence = Sentence("a.py", 1, "rlcli ckpt ls RUN --jsn shows them")
    ((command, words),) = commands_in(sentence)
    assert [word for word in words if word.startswith("--")] == ["--jsn"]
    assert "--jsn" not in options_of(command)
    assert "--json" in options_of(command)
