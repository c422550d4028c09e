"""Checks that the experts that a call records are used, and that backends can record and use
them."""

from __future__ import annotations

from rlcli.api.key_meaning import ROUTED_EXPERTS
from rlcli.recipe.components import declared
from rlcli.recipe.graph import Graph
from rlcli.recipe.parsing.tree import KeyPath, dotted
from rlcli.recipe.schema import Call
from rlcli.recipe.validation.semantics.notes import Notes

SETTING = ("generation", "routing_replay")
OFF = f"{dotted(SETTING)}=false"


def check_routing(notes: Notes, graph: Graph) -> None:
    recording = [name for name, call in graph.calls.items() if ROUTED_EXPERTS in call.outputs]
    following = [name for name, call in graph.calls.items() if ROUTED_EXPERTS in call.inputs]
    for name in (*recording, *following):
        _check_backend(notes, graph.calls[name], graph.at(name))
    for name in recording if not following else ():
        where, needs = _setting(notes, graph.at(name))
        message = f"{dotted(SETTING)} has no effect: no call trains with the experts of {name}"
        notes.note("R71", message, where, f"set {OFF}", needs)


def _check_backend(notes: Notes, call: Call, path: KeyPath) -> None:
    role = notes.recipe.models.get(call.model)
    if role is None or role.backend is None:
        return
    backend = role.backend.type
    if not declared("backends", backend, "ROUTING_REPLAY"):
        key = notes.key(("models", call.model))
        verb = "record" if call.call == "generate" else "prescribe"
        message = (
            f"the backend {backend} of {key} cannot {verb} the experts of tokens, which "
            f"{dotted(SETTING)} asks of {dotted(path)}"
        )
        where, needs = _setting(notes, path)
        needs = [*needs, ("models", call.model, "backend", "type")]
        notes.note_once(("routing", call.model), "R71", message, where, f"set {OFF}", needs)


def _setting(notes: Notes, path: KeyPath) -> tuple[KeyPath, list[KeyPath]]:
    """Where a call is set to record or prescribe experts, and what else that depends on."""
    of_call = (*path, "interface", "args", *SETTING)
    kinds = [(*path, "interface", "type"), (*path, "call"), (*path, "model")]
    return notes.first_set(of_call, SETTING), kinds
