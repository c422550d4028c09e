"""Checks the environments that calls play with, and their arguments."""

from __future__ import annotations

from collections.abc import Mapping

from rlcli.errors import ProjectError, UnknownComponent, UsageError
from rlcli.recipe.components import argument_of, declared, signature_of
from rlcli.recipe.graph import Graph
from rlcli.recipe.parsing.tree import KeyPath
from rlcli.recipe.schema import Call
from rlcli.recipe.validation.semantics.notes import Notes
from rlcli.registry import Signature
from rlcli.registry.arguments import validated


def check_environments(notes: Notes, graph: Graph) -> None:
    for name, call in graph.calls.items():
        arguments = declared("interfaces", call.interface.type, "ENVIRONMENT")
        section = graph.at(name, "interface", "args")
        signature = _named(notes, call, arguments, section) if arguments else None
        if signature is not None:
            _check_arguments(notes, call, signature, (*section, arguments["args"]))
            _check_rewards(notes, call, signature, (*section, arguments["scored"]))


def _named(
    notes: Notes, call: Call, arguments: Mapping[str, str], section: KeyPath
) -> Signature | None:
    """The environment that a call names; None, with the reason reported, if there is none."""
    name = call.interface.args.get(arguments["name"])
    if not isinstance(name, str):  # reported as a missing argument, or one of a wrong type
        return None
    try:
        return signature_of("environments", name)
    except (UnknownComponent, ProjectError) as error:
        message = f"{error.where}: {error.what}" if error.where else error.what
        notes.note(error.code, message, (*section, arguments["name"]), error.hint)
        return None


def _check_arguments(notes: Notes, call: Call, signature: Signature, path: KeyPath) -> None:
    try:
        validated("environments", signature.name, call.interface.args.get(str(path[-1])) or {})
    except UsageError as error:
        notes.note(error.code, error.what, path, error.hint)


def _check_rewards(notes: Notes, call: Call, signature: Signature, path: KeyPath) -> None:
    """An environment that is to reward episodes must be able to."""
    is_scored = argument_of("interfaces", call.interface, str(path[-1]))
    is_able = {"step", "score"} & signature.methods or signature.has_unread_bases
    if is_scored and not is_able:
        message = f"the environment {signature.name} has neither score() nor step()"
        hint = f"give it one, or leave rewards to a call of the graph: {path[-1]}=false"
        notes.note("R71", message, path, hint)
