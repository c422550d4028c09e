"""Checks that sequences fit into the model's positions and the KV cache,
and groups into a micro-batch."""

from __future__ import annotations

from rlcli.api.key_meaning import SEQUENCES
from rlcli.recipe.call_keys import graphs_of
from rlcli.recipe.components import dataset_keys
from rlcli.recipe.lengths import (
    cache_of,
    generation_of,
    keeps_groups,
    limit_of_rows,
    positions_of,
    responses_of,
    scores_sequences,
)
from rlcli.recipe.parsing.tree import KeyPath
from rlcli.recipe.schema import Call
from rlcli.recipe.validation.semantics.notes import Notes


def check(notes: Notes) -> None:
    for path, calls, dataset in graphs_of(notes.recipe):
        for name, call in calls.items():
            if call.call == "generate" and dataset is not None:
                _positions(notes, call, (*path, name), dataset)
                _cache(notes, call, (*path, name), dataset)
    for name, call in notes.recipe.graph.items():
        if call.call == "train_step":
            _rows(notes, call, ("graph", name))
        if call.call == "generate":
            _micro_batches(notes, call, ("graph", name))


def _positions(notes: Notes, call: Call, path: KeyPath, dataset: str) -> None:
    """Check prompt and response against `max_position_embeddings` of the generating role."""
    limit = positions_of(notes.recipe, call.model, notes.positions)
    new = generation_of(notes.recipe, call)["max_new_tokens"]
    if limit is None or not isinstance(new, int):
        return
    positions, role = limit
    component = notes.recipe.datasets.get(dataset)
    prompt = limit_of_rows(component) if component else None
    if (prompt or 1) + new <= positions:
        return
    prompts = f"prompts of up to {prompt} tokens and " if prompt else ""
    message = (
        f"{prompts}responses of up to {new} do not fit into the {positions} "
        f"positions of models.{role}"
    )
    told: KeyPath = (*path, "interface", "args", "generation", "max_new_tokens")
    row: KeyPath = ("datasets", dataset, "args", "max_length")
    where = notes.first_set(told, ("generation", "max_new_tokens"), row, path)
    room = positions - (prompt or 1)
    hint = f"use max_new_tokens of at most {room}" if room > 0 else None
    if prompt and positions > new:
        shorter = f"datasets.{dataset}.args.max_length of at most {positions - new}"
        hint = f"{hint}, or {shorter}" if hint else f"use {shorter}"
    needs: list[KeyPath] = [("models", role), ("datasets", dataset), (*path, "model"), told]
    notes.note_once(("positions", new, role), "R49", message, where, hint, needs)


def _cache(notes: Notes, call: Call, path: KeyPath, dataset: str) -> None:
    """Check one response and its prompt against the KV cache of the generating role."""
    room, new = (
        cache_of(notes.recipe, call.model),
        generation_of(notes.recipe, call)["max_new_tokens"],
    )
    component = notes.recipe.datasets.get(dataset)
    prompt = (limit_of_rows(component) if component else None) or 1
    if room is None or not isinstance(new, int) or prompt + new <= room:
        return
    message = (
        f"a KV cache of {room} tokens has no room for a prompt of {prompt} and a response of {new}"
    )
    told: KeyPath = (*path, "interface", "args", "generation", "max_new_tokens")
    needs: list[KeyPath] = [
        ("datasets", dataset),
        (*path, "model"),
        told,
        ("generation", "max_new_tokens"),
    ]
    where: KeyPath = ("models", call.model, "backend", "args", "kv_cache_tokens")
    notes.note_once(
        ("cache", room, call.model), "R49", message, where, f"use at least {prompt + new}", needs
    )


def _rows(notes: Notes, call: Call, path: KeyPath) -> None:
    """Check rows that are whole sequences against the positions of the role trained on them."""
    dataset = notes.recipe.train.dataset
    component = notes.recipe.datasets.get(dataset)
    model_limit = positions_of(notes.recipe, call.model, notes.positions)
    limit = limit_of_rows(component) if component else None
    if component is None or model_limit is None or limit is None:
        return
    positions, role = model_limit
    if limit <= positions:
        return
    if SEQUENCES not in (dataset_keys(notes.recipe.datasets, dataset) or ()):
        return
    message = (
        f"rows of up to {limit} tokens do not fit into the {positions} positions of models.{role}"
    )
    needs: list[KeyPath] = [("models", role), ("datasets", dataset), (*path, "model")]
    row: KeyPath = ("datasets", dataset, "args", "max_length")
    notes.note_once(("rows", limit, role), "R49", message, row, f"use at most {positions}", needs)


def _micro_batches(notes: Notes, call: Call, path: KeyPath) -> None:
    """All responses to a prompt are one sample, which may be cut only for interfaces that allow
    it."""
    new = generation_of(notes.recipe, call)["max_new_tokens"]
    responses = responses_of(notes.recipe, call)
    component = notes.recipe.datasets.get(notes.recipe.train.dataset)
    prompt = (limit_of_rows(component) if component else None) or 0
    if not isinstance(new, int):
        return
    shared: list[KeyPath] = [
        ("generation", key) for key in ("responses_per_prompt", "max_new_tokens")
    ]
    for name, reader in notes.recipe.graph.items():
        cap = reader.max_tokens_per_microbatch or notes.recipe.train.max_tokens_per_microbatch
        together = responses if keeps_groups(reader) else 1
        if scores_sequences(notes.recipe, reader) and together * new > cap:
            cap_path: KeyPath = ("graph", name, "max_tokens_per_microbatch")
            where = notes.first_set(cap_path, ("train", "max_tokens_per_microbatch"), *shared, path)
            group = f"a prompt's {together} responses" if together > 1 else "a response"
            message = f"a micro-batch holds {cap} tokens; {group} of up to {new} must fit into one"
            least = together * (prompt + new)
            needs: list[KeyPath] = [cap_path, ("generation",), (*path, "interface")]
            notes.note_once(("cap", cap), "R49", message, where, f"use at least {least}", needs)
